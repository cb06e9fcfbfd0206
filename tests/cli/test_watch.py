"""``rollwright watch`` and ``inspect --html``: what they show, and what they refuse."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from tests.envs.transforms.test_recorder import painted

from rollwright.collectors import Collector
from rollwright.data.datasets import DatasetWriter


def frames_of(path):
    return imageio.imread(path, index=None)


@pytest.fixture
def dataset(tmp_path):
    """Ten frames of two episodes that ended and one that did not."""
    with Collector(painted, frames_per_batch=10, total_frames=10) as collector:
        batch = collector.next()
    with DatasetWriter(tmp_path / "data", steps=10) as writer:
        writer.write(batch)
    return tmp_path / "data"


def test_an_environment_is_shown_until_its_episode_ends(run, tmp_path):
    pytest.importorskip("pygame")
    out = tmp_path / "run.gif"
    result = run("watch", "CartPole-v1", "--seed", 1, "--max-frames", 5, "--episodes", 2, "--output", out)
    assert result.status == 0, result.err
    assert result.out.splitlines()[-1] == f"wrote {out}: 10 frames, 2 complete episodes, mean return 5"
    assert frames_of(out).shape[0] > 5


def test_the_images_of_a_dataset_are_shown_as_they_are(run, dataset, tmp_path):
    out = tmp_path / "run.gif"
    result = run("watch", dataset, "--episodes", 2, "--output", out)
    assert result.status == 0, result.err
    assert "8 frames, 2 complete episodes" in result.out
    assert frames_of(out).shape == (8, 8, 6, 3)
    np.testing.assert_allclose(frames_of(out)[:, 0, 0, 0], [0, 1, 2, 3] * 2, atol=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["CartPole-v1"], "there is no display for a window (DISPLAY is not set). Pass --output run.gif"),
        (["CartPole-v1", "--output", "run.avi"], "--output: expected a path that ends in .mp4 or .gif, got 'run.avi'"),
        (["CartPol-v1", "--output", "run.gif"], "CartPol"),
        (["{dataset}"], "--output: a dataset is shown as a video"),
    ],
)
def test_what_cannot_be_shown_is_refused(run, dataset, monkeypatch, arguments, text):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    result = run("watch", *(each.format(dataset=dataset) for each in arguments))
    assert result.status == 2
    assert text in result.err


class Page(HTMLParser):
    """Counts tags, and collects what they refer to."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.refers = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs).get("class")))
        self.refers += [value for name, value in attrs if name in ("src", "href")]


def test_a_page_shows_boundaries_and_images_and_needs_nothing_else(run, dataset, tmp_path):
    out = tmp_path / "page.html"
    result = run("inspect", dataset, "--check", "--html", out)
    assert result.status == 0, result.err
    assert result.out.splitlines()[-1] == f"page: {out}"
    text = out.read_text()
    page = Page(text)
    assert [tags for tags in page.tags if tags[0] == "rect"] == [("rect", "open"), ("rect", "end"), ("rect", "end")]
    assert "frames 4 to 7, return 4, terminated" in text
    assert "Passed." in text
    [image] = page.refers
    assert image.startswith("data:image/gif;base64,")
    assert imageio.imread(base64.b64decode(image.split(",")[1]), extension=".gif", index=None).shape == (10, 8, 6, 3)
    assert not re.search(r"https?://|<script", text)


def test_a_page_has_a_row_for_each_environment_also_where_none_has_ended(run, tmp_path):
    batch = torch.stack([row(4), row(None), row(6)], 0)
    with DatasetWriter(tmp_path / "data", steps=10) as writer:
        writer.write(batch)
    out = tmp_path / "<page>.html"
    assert run("inspect", tmp_path / "data", "--html", out).status == 0
    places = re.findall(r'<rect class="(\w+)".*? y="(\d+)"', out.read_text())
    assert places == [("open", "2"), ("end", "2"), ("open", "16"), ("open", "30"), ("end", "30")]


def row(end):
    with Collector(painted, frames_per_batch=10) as collector:
        batch = collector.next().select(("next", "reward"), ("next", "done"), ("next", "terminated")).clone()
    for name in ("done", "terminated"):
        batch["next", name][:] = False
        if end is not None:
            batch["next", name][end] = True
    return batch


def test_a_misspelt_command_is_answered_with_the_most_similar_one(run):
    result = run("inspct", "here")
    assert result.status == 2
    assert "Did you mean 'inspect'?" in result.err


def test_prints_json(run, tmp_path):
    result = run("watch", "CartPole-v1", "--output", tmp_path / "run.gif", "--max-frames", 5, "--json")
    assert json.loads(result.out)["output"] == str(tmp_path / "run.gif")
    assert 0 < json.loads(result.out)["frames"] <= 5
