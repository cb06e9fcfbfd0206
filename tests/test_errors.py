"""Imports of optional dependencies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollwright.errors import MissingExtraError, require

PROGRAM = """
import sys, threading
from rollwright.errors import require

WANTED = [
    ("transformers", "DynamicCache"),
    ("transformers.cache_utils", "DynamicLayer"),
    ("transformers.utils.chat_template_utils", "render_jinja_template"),
    ("transformers", "AutoTokenizer"),
    ("transformers", "AutoModelForCausalLM"),
]
start, found = threading.Barrier(len(WANTED)), []

def work(module, name):
    start.wait()
    found.append(require(module, name=name, extra="llm", purpose="a test").__name__)

assert "transformers" not in sys.modules
threads = [threading.Thread(target=work, args=wanted) for wanted in WANTED]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(found) == sorted(name for _, name in WANTED), found
"""


@pytest.mark.llm
def test_threads_may_need_a_dependency_for_the_first_time_at_once():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_not_installed_names_the_command():
    with pytest.raises(MissingExtraError, match=r"a test needs the package 'no_such_package'.*rollwright\[some\]"):
        require("no_such_package.part", name="thing", extra="some", purpose="a test")
    assert require("json.decoder", name="JSONDecoder", extra="some", purpose="a test").__name__ == "JSONDecoder"
