# Thin: every target is one command of `python -m course_utils`, inside a virtual environment that is made once.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

.PHONY: notebooks test setup weights lab export render check lint clean

notebooks: weights            ## run the chapters, print the verdicts
	$(PY) -m course_utils run $(ARGS)

test: weights                 ## unit tests, exported definitions, the notebooks in quick mode
	$(PY) -m pytest tests $(ARGS)

setup: $(STAMP)               ## virtual environment and packages

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "Could not make a virtual environment (on Debian and Ubuntu: apt install python3-venv)."; exit 1; }
	$(PY) -m pip install --quiet -r requirements.txt
	$(PY) -m pip install --quiet --no-deps -e .
	@touch $(STAMP)

weights: setup                ## download and convert the model once, into the user's cache folder
	@$(PY) -m course_utils fetch

lab: weights                  ## open JupyterLab
	$(PY) -m jupyter lab notebooks

export: setup                 ## notebooks' export cells -> course_utils/chapters/*.py
	$(PY) -m course_utils export

render: weights               ## run the notebooks in full and keep their outputs
	$(PY) -m course_utils render $(ARGS)

check: setup                  ## the notebook gate
	$(PY) -m course_utils check

lint: setup
	$(PY) -m ruff check .

clean:
	rm -rf build
