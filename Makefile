# `make demo` and `make test` need Python 3.11 or newer and nothing else; they set up .venv themselves.

NEW_ENOUGH = -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do $$p $(NEW_ENOUGH) && echo $$p && break; done)
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: setup demo test test-long test-full test-latest bench mutation attacks fuzz soak term throughput trials validate kernels aot build constraints lint site serve system browser validate-gpu measure-single-device clean

setup: $(READY)

demo: $(READY) system
	@$(BIN)/python -m autograder.proof.demo $(ARGS)

# Three workers on two cores, since many tests wait for other processes.
test: $(READY) system browser aot
	$(BIN)/python -m pytest -n 3 $(ARGS)

# The tests that take longest; ARGS="site" selects a folder.
test-long: $(READY) system browser aot
	$(BIN)/python -m pytest -n 3 -m long $(ARGS)

# Both, every mutant and alternative on every mesh (mutants of the slowest functions on some), and the long forms of other tests; CHAPTER="fsdp or pipeline" selects chapters.
test-full: $(READY) system browser aot
	MESHCRAFT_FULL=1 $(BIN)/python -m pytest -n 3 $(if $(CHAPTER),-k "$(CHAPTER)") $(ARGS)
	@$(BIN)/python -m autograder.proof.coverage $(filter-out or,$(CHAPTER))

# The same tests on the newest Python found here, with the jax version that it gets.
test-latest:
	@for p in python3.14 python3.13 python3.12 $$(ls -d $$HOME/.pyenv/versions/3.1[234]*/bin/python 2>/dev/null | sort -rV); do \
		$$p $(NEW_ENOUGH) && exec $(MAKE) test PYTHON=$$p VENV=.venv-latest; \
	done; echo "no Python newer than 3.11 was found"; exit 1

# Make mechanical mistakes in every solution, and report those that no fact rejects; a stopped run resumes.
mutation: $(READY)
	@$(BIN)/python -m autograder.proof.mutation $(ARGS)

# Judge references on what many courses' secrets draw: no right answer may come close to a limit by chance; ARGS="fsdp --courses 50".
draws: $(READY)
	@$(BIN)/python -m autograder.proof.draws $(ARGS)

bench: $(READY) system
	@$(BIN)/python -m autograder.proof.bench $(ARGS)

# Long versions of what `make test` does briefly; ARGS="--help" lists the options of each.
# Every attack on the grader, and how stock nbgrader handles it.
attacks: $(READY) system
	@$(BIN)/python -m autograder.proof.attacks $(ARGS)

# Ten thousand mutations of real Programs; a stopped run resumes.
fuzz: $(READY) system
	@$(BIN)/python -m autograder.proof.attacks.campaign $(ARGS)

# A class of 200, graded while 300 processes are killed.
soak: $(READY) system
	@$(BIN)/python -m autograder.proof.soak $(ARGS)

# Rates, times and memory on a real GPU, kept in course/measurements/; ARGS="--limit 540" stops after 540 seconds.
validate-gpu: $(READY)
	@$(BIN)/python -m course.measured.validate $(ARGS)

# The six steps of the chapter `single_device` on a real GPU: run cards in course/measurements/; ARGS="--help" says more.
measure-single-device: $(READY)
	@$(BIN)/python -m course.measured.single_device $(ARGS)

# Compare runs of `meshcraft train`: several meshes, killed and resumed, two processes; ARGS=--short uses a tiny model.
trials: $(READY)
	@$(BIN)/python -m autograder.proof.train_e2e $(ARGS)

# Compare every published figure with the lenses: ARGS="--short" for a few, "--write" to save the result.
validate: $(READY) aot
	@$(BIN)/python -m course.validation $(ARGS)

# A term of 120 students: late work, extensions, changed points, damaged files; every score is checked against a table.
term: $(READY)
	@$(BIN)/python -m autograder.proof.term $(ARGS)

# Submissions per hour, booking and feedback for a class of 120; ARGS="--before COMMIT" measures that commit first.
throughput: $(READY) system
	@$(BIN)/python -m autograder.proof.throughput $(ARGS)

# Compare the timeline and liveness of programs with the GPU compiler's results.
kernels: $(READY) aot
	@$(BIN)/python -m autograder.proof.kernels $(ARGS)

# Install XLA's GPU compiler, which needs no GPU, in its own folder; without it, the compiled lens says so.
aot: $(READY)
	@$(BIN)/python -m course.program.compiled

# Build exercises and references from the solutions.
build: $(READY)
	$(BIN)/meshcraft build

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

site: $(READY)
	$(BIN)/mkdocs build --strict -f site/mkdocs.yml

serve: $(READY)
	$(BIN)/mkdocs serve -f site/mkdocs.yml

# Install the sandbox's system packages if permitted; without them, grading falls back to Landlock and says so.
system:
	@command -v bwrap >/dev/null && ldconfig -p 2>/dev/null | grep -q libseccomp.so.2 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing bubblewrap for the sandbox"; \
		{ apt-get update -qq && apt-get install -y -qq bubblewrap libseccomp2; } >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "The sandbox works best with bubblewrap and libseccomp2, and they are not installed here."; \
	echo "Install them with your package manager; 'meshcraft doctor' shows what is used without them."

# Install a browser for the tests of the site and of formgrader; without one, they are skipped and say so.
browser:
	@for b in chromium chromium-browser google-chrome; do command -v $$b >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium for the tests"; \
		{ apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "Chromium is not installed here: the tests that need a browser are skipped."

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and none was found"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing what the course needs into $(VENV) (a few minutes, once)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,site]'
	@touch $(READY)

# Pin the newest versions of everything, for the oldest and the newest Python found here.
constraints:
	$(PYTHON) constraints.py

clean:
	rm -rf build .venv-latest
