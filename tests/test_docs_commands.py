"""Every command line that README and docs show runs, shortened, in the order of its page; searches find words."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests import llm_models
from tests.envs.transforms.test_recorder import painted

from rollwright._processes.network.handshake import SECRET
from rollwright.cli import main
from rollwright.cli.parser import build_parser
from rollwright.collectors import Collector
from rollwright.data.datasets import DatasetWriter

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/command_line.md", "docs/benchmarks.md"]
ELSEWHERE = ("join", "top")  # need a collector that runs: tests/collectors/workers/remote, tests/cli/test_top.py
SHORTER = {"--frames": "120", "--workers": "2", "--num-envs": "2"}
MODULES = {
    "rewards": "def right(completions, **columns):\n    return [float(len(each)) for each in completions]\n",
    "my_policies": "import torch\ndef make_policy():\n"
    "    return lambda td: td.set('action', torch.nn.functional.one_hot(torch.tensor(1), 2))\n",
    "my_envs": "class Guess:\n    def __init__(self, row):\n        self.turns = 0\n"
    "    def reply(self, messages):\n        self.turns += 1\n        return 'again', 0.0, self.turns > 1\n",
}


def lines_of(page):
    """Commands of a page, shortened."""
    for line in (ROOT / page).read_text().splitlines():
        words = shlex.split(line, comments=True) if line.startswith("rollwright ") else [""]
        if words[0] != "rollwright" or words[1] in ELSEWHERE or any(re.search(r"[A-Z]{3,}|\[", word) for word in words):
            continue
        for option, value in SHORTER.items():
            if option in words:
                words[words.index(option) + 1] = value
        yield [re.sub(r"\.mp4$", ".gif", word) for word in words[1:]]  # mp4 needs ffmpeg


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the commands name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "prompts.jsonl").write_text('{"query": "2 + 2?"}\n{"query": "3 + 3?"}\n')
    for place in ("model", "models/tiny"):
        llm_models.model().save_pretrained(tmp_path / place)
        llm_models.tokenizer().save_pretrained(tmp_path / place)
    with Collector(painted, frames_per_batch=10, total_frames=10) as collector:
        batch = collector.next()
    with DatasetWriter(tmp_path / "runs" / "pong", steps=10) as writer:
        writer.write(batch)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.llm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(folder, page, capfd):
    for name in ("matplotlib", "pygame", "minari", "transformers"):
        pytest.importorskip(name)
    threads, ran = torch.get_num_threads(), []
    for words in lines_of(page):
        more = ["--max-new-tokens", "4"] if words[0] == "chat-collect" else []
        status = main([*words, *more])
        assert status == 0, (words, capfd.readouterr().err)
        ran.append(words[0])
    assert ran
    assert torch.get_num_threads() == threads


def blocks(language):
    text = (ROOT / "docs" / "recipes.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def joined(words):
    """What an address and a limit of ``rollwright join`` in a recipe are."""
    arguments = build_parser().parse_args(words)
    assert arguments.command == "join"
    return arguments.address.rpartition(":")[2], arguments.timeout


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_script_for_slurm_starts_a_learner_and_workers(tmp_path, rank):
    (script,) = blocks("bash")
    assert len(re.findall("^#SBATCH --", script, re.MULTILINE)) == 5
    fakes = {
        "scontrol": "echo node1; echo node2",
        "openssl": "echo 0123456789abcdef",
        "srun": 'shift; exec "$@"',
        "python": 'echo "learner $ROLLWRIGHT_SECRET"',
        "rollwright": 'echo "$ROLLWRIGHT_SECRET $@"',
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_PROCID": rank, "SLURM_JOB_NODELIST": "node[1-2]"}
    done = subprocess.run(
        ["bash", "-eu", "-c", script], env=env, capture_output=True, text=True, timeout=20, check=True
    )
    first, *rest = done.stdout.split()
    if rank == "0":
        assert [first, *rest] == ["learner", "0123456789abcdef"]
    else:
        assert first == "0123456789abcdef"
        assert rest[1] == "node1:29400"
        assert joined(rest) == ("29400", 600)


def test_the_manifests_for_kubernetes_fit_together():
    yaml = pytest.importorskip("yaml")
    (text,) = blocks("yaml")
    service, learner, workers = yaml.safe_load_all(text)
    assert [each["kind"] for each in (service, learner, workers)] == ["Service", "Job", "Job"]
    assert service["spec"]["selector"] == learner["spec"]["template"]["metadata"]["labels"]
    (port,) = service["spec"]["ports"]
    learns, works = (each["spec"]["template"]["spec"]["containers"][0] for each in (learner, workers))
    assert learns["ports"] == [{"containerPort": port["port"]}]
    assert works["command"][2] == f"{service['metadata']['name']}:{port['port']}"
    assert joined(works["command"][1:]) == (str(port["port"]), 600)
    assert learns["env"] == works["env"]
    assert learns["env"][0]["name"] == SECRET


WORDS = ["tutorial", "video", "wandb", "slow", "checkpoint", "resume", "prioritized", "Atari", "GPU"]


def test_the_search_index_finds_what_people_search_for(tmp_path):
    pytest.importorskip("myst_parser")
    from sphinx.search.en import SearchEnglish

    source, target = tmp_path / "docs", tmp_path / "html"
    source.mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, source)
    (source / "conf.py").write_text(
        "extensions = ['myst_parser', 'sphinx_design']\nmyst_enable_extensions = ['colon_fence', 'deflist']\n"
        "html_theme = 'basic'\n"
    )
    build = [sys.executable, "-m", "sphinx", "-Q", "-b", "html", source, target]
    subprocess.run(build, check=True, timeout=100)
    index = json.loads((target / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    stem = SearchEnglish({}).stem
    missing = [
        word for word in WORDS if not {word.lower(), stem(word.lower())} & {*index["terms"], *index["titleterms"]}
    ]
    assert missing == []
