# Each command is sufficient on a fresh machine: it makes .venv from constraints.txt when needed.
# Where Python is told to write no bytecode, each of hundreds of processes would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup demo test test-slow test-all test-nightly check dist docs docs-run docs-changed

help:
	@echo "make demo    train on text that is here already, evaluate, write text, draw the curves"
	@echo "make test    run the tests, but for slow ones: a few minutes"
	@echo "make test-slow  run the slow ones, and check types and shapes in the core's signatures"
	@echo "make test-all  both"
	@echo "make test-nightly  all tests, with full numbers of what is tried at random: an hour"
	@echo "make check   lint, types, import layers, spelling, the house rules"
	@echo "make dist    build the distributions and check them; nothing is published"
	@echo "make docs    write the site to build/docs: build/docs/index.html"
	@echo "make docs-run  execute the tutorials of the site anew, then write it"
	@echo "make docs-changed  the same, but only the tutorials whose code or packages changed"
	@echo "make setup   only make .venv, with the command .venv/bin/txl"
	@echo "             (make test, check and docs install what they need into it)"
	@echo "PYTHON=...   with any of these: the Python (3.11 or newer) to make .venv with"

setup:
	@scripts/setup

demo: setup
	.venv/bin/txl train demo --out runs/demo --json

test:
	@scripts/test

test-slow:
	@scripts/test --slow

test-all: test test-slow

test-nightly:
	@scripts/test --nightly

check:
	@scripts/check

dist:
	@scripts/dist

docs:
	@scripts/setup dev
	# Sphinx keeps pages of what is gone.
	@rm -rf build/docs/*
	.venv/bin/python -m sphinx --quiet --write-all --fail-on-warning --keep-going docs build/docs
	.venv/bin/python scripts/docs/site_links.py build/docs

docs-run:
	@scripts/setup dev
	.venv/bin/python scripts/docs/tutorials.py
	@$(MAKE) docs

docs-changed:
	@scripts/setup dev
	.venv/bin/python scripts/docs/tutorials.py --changed
	@$(MAKE) docs
