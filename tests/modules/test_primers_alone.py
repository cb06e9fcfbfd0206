"""Modules make primers in programs that import nothing but them."""

import subprocess
import sys


def test_a_primer_is_made_without_importing_environments():
    program = (
        "from rollwright.modules import GRUModule\n"
        "gru = GRUModule(input_size=4, hidden_size=2, in_keys=['o', 's', 'is_init'], out_keys=['f', ('next', 's')])\n"
        "print(type(gru.make_tensordict_primer()).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "TensorDictPrimer\n", done.stderr
