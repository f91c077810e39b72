"""The chapters' definitions, generated from the notebooks by ``make export``."""
