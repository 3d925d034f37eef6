# Everything a person or a machine does with this checkout, by name.
PYTHON ?= python3.11
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help setup lightning demo test test-tail test-random mutants test-fast test-slow test-timed test-long test-cuda test-torch parity parity-table families families-table simulate dist site check format bench chaos chaos-hosts storms clean

help:            ## say what can be made
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

setup: .venv/dev ## make the environment in .venv, with what the tests and checks need

# What installs: uv where it is there. It does not know where pip finds torch (an index of CPU wheels,
# a folder), so pip installs torch, and uv may not change it.
UV := $(shell command -v uv 2>/dev/null)
PIP := $(BIN)/python -m pip
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(PIP) install --no-compile)
KEEP := --quiet --constraint .venv/torch.txt

# The range that `make setup` takes torch from; the package itself allows more. Above 2.13 some places
# that offer CPU wheels have only those for CUDA, gigabytes of them: `make setup TORCH=torch==2.14.1`.
TORCH ?= torch>=2.11,<2.14

# Without compiling what is installed: that takes longer than all the rest, and each module that is
# imported is compiled then.
.venv/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet --no-compile "$(TORCH)" "setuptools>=77"
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > .venv/torch.txt
	$(INSTALL) $(KEEP) --no-build-isolation --editable ".[examples]"
	touch $@

.venv/dev: .venv/ready
	$(INSTALL) $(KEEP) --editable ".[dev]"
	touch $@

demo: .venv/ready ## train the first example on two processes, ending with a report
	env -u OMP_NUM_THREADS $(BIN)/instep run examples/01_digits/job.toml --workers 2

# Not set where it is asked for: each of the processes would rewrite every test anew.
unexport PYTHONDONTWRITEBYTECODE

test: setup      ## the suite: each promise, shown once; some ten minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-tail: setup ## more of what the suite shows: other sizes, seeds and moments, and whole runs
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "tail and not slow and not timed and not long and not parity and not cuda"

test-random: setup ## the suite in an order drawn from SEED
	$(BIN)/python -m pytest -n 3 --dist loadfile --random-order=$(or $(SEED),1)

mutants: setup   ## lines of the core, changed on purpose: which does no test notice? (SEED, COUNT)
	$(BIN)/python tests/mutants.py --seed $(or $(SEED),1) --count $(or $(COUNT),20)

# No run, and none of the files that take seconds for each test: 91 % of the tests in 41 % of the time.
SLOWER := control/test_a_silent_worker data/test_loader data/test_unreadable \
	integrity/test_corruption recipe/test_quick_start engine/test_fence

test-fast: setup ## most of the tests, in some four minutes on two cores; before each commit
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not process and not slow and not timed and not long and not parity and not tail" \
		$(SLOWER:%=--ignore=tests/unit/%.py) tests/unit tests/contract tests/test_*.py

.venv/loggers: .venv/dev
	$(INSTALL) $(KEEP) --editable ".[wandb,mlflow]"
	touch $@

lightning: .venv/lightning/ready ## an environment of its own for Lightning, beside whose result ours is tested

.venv/lightning/ready: .venv/dev
	$(BIN)/python -m venv --without-pip .venv/lightning
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(.venv/lightning/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch.pth
	$(BIN)/python -m pip --python .venv/lightning/bin/python install --quiet "lightning>=2.5"
	touch $@

test-slow: setup .venv/loggers .venv/lightning/ready ## what takes longer; its verdict does not depend on the machine's speed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

test-timed: setup ## what does depend on the machine's speed; on a quiet machine
	$(BIN)/python -m pytest -m timed

test-long: setup ## what takes many minutes; leaves a dated result
	$(BIN)/python -m pytest -m long --timeout 3600 --junitxml benchmarks/results/$$(date +%F)-test-long.xml

test-cuda: setup ## what needs a GPU: pairs of model and loss, strategies, codecs, kills
	$(BIN)/python -m pytest -n 4 -m cuda

test-torch:      ## the contract suites with another torch: make test-torch VERSION=2.14.1
	$(PYTHON) tests/other_torch.py "$(VERSION)"

parity: setup    ## every pair of model and loss against a plain PyTorch loop (some minutes); PART=1/2: each second
	$(BIN)/python -m pytest -n 2 -m parity $(PART:%=--parity-part %) tests/parity

parity-table: setup ## the same, and the table of the documents is written
	$(BIN)/python -m pytest -n 2 -m parity --parity-table tests/parity

families: setup  ## 25 families of models on each kind of mesh against a plain PyTorch loop (some minutes)
	$(BIN)/python -m pytest -m slow tests/families/test_families.py

families-table: setup ## the same, and the table of the documents is written
	$(BIN)/python -m pytest -m slow --families-table tests/families/test_families.py

simulate: setup  ## SEEDS stories of the control plane, ten thousand (ten minutes and more on two cores)
	$(BIN)/python tests/simulation/leases.py --games 1500
	$(BIN)/python tests/simulation/run.py --seeds $(or $(SEEDS),10000) --jobs 2

dist: setup      ## a wheel and a source archive in dist
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --outdir dist .

site: setup      ## the documents as a web site in build/site
	$(BIN)/python docs/make_site.py build/site

check: setup     ## format, lint, types, layers, limits, figures and links of the documents; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_house.py -k limit
	$(BIN)/python docs/make_benchmarks.py --check
	$(BIN)/python docs/make_site.py --check

format: setup    ## let the tools mend what they can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup     ## every benchmark, one after the other (an hour)
	for name in against_torch startup loader checkpoint bits lattice recovery slow_worker host_memory; do $(BIN)/python benchmarks/$$name.py || exit 1; done

chaos: setup     ## 100 kills and 5 hangs of a run on the digits, and of a small GPT; the bits must be those of an undisturbed one
	$(BIN)/instep chaos examples/01_digits/job.toml --kills 100 --hangs 5 --seed 1 --workers 3 --set train.determinism=bits --set checkpoint.every=50
	$(BIN)/instep chaos examples/02_gpt/job.toml --kills 100 --hangs 5 --seed 2 --workers 3 --set train.determinism=bits --set checkpoint.every=50 \
		--set train.steps=400 --set arguments.steps=400 --set arguments.layers=2 --set arguments.width=128 --set arguments.length=64 --set arguments.dropout=0.1

chaos-hosts: setup ## the digits on emulated hosts that are killed, stopped and cut off; needs root
	$(BIN)/instep chaos examples/01_digits/job.toml --kills 40 --hangs 5 --partitions 20 --seed 3 --workers 5 --set train.determinism=bits --set checkpoint.every=50

storms: setup    ## 200 short runs of every strategy and mesh, in which processes are killed and stopped; two hours
	$(BIN)/python benchmarks/storms.py --storms 200

clean:           ## remove what make and the runs left
	rm -rf .venv runs build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
