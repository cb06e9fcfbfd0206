"""Write docs/torchrl_names.md: which public names of TorchRL are here, and what to use in place of the others.

Run it where something was added: ``python docs/torchrl_names.py``. A test compares what it writes with the file.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES, PAGE = FOLDER / "torchrl_names.txt", FOLDER / "torchrl_names.md"

DIFFERENT = {
    "AsyncEnvPool": "makes a pool of threads or of processes, by `backend=`",
    "BraxEnv": "takes `num_envs=` and `episode_length=`; the state of the simulation is not among the data",
    "CatFrames": "`as_inverse=True` is an error",
    "ConsumingSampler": "rows that are used up are not filled first: the ring overwrites the oldest",
    "DMControlEnv": "`set_seed(n)` gives the episodes of dm_control's `random=n`",
    "EnvCreator": "makes no environment before it is called; its environments share no memory",
    "Evaluator": "takes one environment and gives a dictionary of numbers",
    "FrameSkipTransform": "stops where a trajectory ends",
    "ListStorage": "keeps copies",
    "MultiStep": "shifts `done` with the rewards",
    "ParallelEnv": "options of TorchRL's memory are accepted and change nothing",
    "PettingZooEnv": "agents of one group have one space",
    "RandomTruncationTransform": "a reset of all environments draws new horizons",
    "ReplayBuffer": "`empty()` keeps `write_count`, unless `empty_write_count=True`",
    "SqueezeTransform": "refuses a dimension of another size than one",
    "TargetReturn": "has the dtype of the reward",
    "VecNorm": "counts a reset in its rows alone; states are shared by `state_dict()`",
    "VmasEnv": "tells `terminated` and `truncated` apart; agents that differ are groups of their own",
    "VecNormV2": "`stateful=False`, `lock=` and `shared_data=` are not there",
    "set_gym_backend": "`'gym'` means gymnasium, with a warning",
}

INSTEAD = [  # the first whose pattern matches "module.Name" as a whole
    (r".*Updater(V2)?", "a `WeightSyncScheme`, see [weights](weights.md)"),
    (r"collectors\.AsyncBatched.*", "`AsyncCollector`, or `Collector` with an `AsyncEnvPool`"),
    (r"collectors\..*", "an option of `Collector`, see [workers](workers.md)"),
    (
        r"data\..*(Checkpointer|H5.*|TED.*|.*2TED|.*2Nested|Nested2.*)",
        "`dumps()`, `loads()`, `state_dict()` of a buffer",
    ),
    (r"data\.(Compressed|Store|Storage|Sampler|Writer).*", "what the page on [replay](replay.md) lists"),
    (r"data\..*([tT]raj|Sample|Sequence|Streaming|Predicate).*", "a `SliceSampler`, `split_trajectories`"),
    (
        r"data\..*(Action|KL|Prompt|Token|Pairwise|Rollout|TopK|dataloader|Content).*",
        "TorchRL's own; [dialogues](llm.md)",
    ),
    (r"data\..*", "TorchRL's own, on our batches"),
    (r"envs\..*EnvPool", "`AsyncEnvPool(backend=...)`"),
    (r"envs\..*(Env|Wrapper|Task|TaskSampler|Spec|Mapping)", "TorchRL's own, which every collector takes"),
    (r"envs\..*", "TorchRL's own, in TorchRL's `TransformedEnv`, which every collector takes"),
    (r"modules\.(AdditiveGaussian|EGreedy|OrnsteinUhlenbeckProcess)Wrapper", "the `...Module` of the same name"),
    (r"modules\..*", "TorchRL's own, which acts in every collector"),
    (r"weight_update\..*", "a `WeightSyncScheme`, see [weights](weights.md)"),
]


def modules() -> dict[str, list[str]]:
    """Names of TorchRL by module."""
    text = re.sub(r"^#.*\n", "", NAMES.read_text()).replace("\n  ", " ")
    found = (line.partition(": ") for line in text.splitlines())
    return {module: names.split() for module, _, names in found}


def page() -> str:
    """The page, as the package is now."""
    lines = [
        "# Names of TorchRL",
        "",
        "Written by `docs/torchrl_names.py`, from the public names of TorchRL 0.14.1. What is there has the same name",
        "and path, `rollwright` in place of `torchrl`. What behaves differently, and why, is on the page on",
        "[coming from TorchRL](coming_from_torchrl.md).",
    ]
    for module, names in modules().items():
        ours = importlib.import_module(f"rollwright.{module}")
        there = [name for name in names if hasattr(ours, name)]
        lines += [
            "",
            f"## `{module}`",
            "",
            f"There, {len(there)} of {len(names)}: {', '.join(f'`{n}`' for n in there)}.",
        ]
        different = [name for name in there if name in DIFFERENT]
        if different:
            lines += ["", "| there, and different | how |", "| --- | --- |"]
            lines += [f"| `{name}` | {DIFFERENT[name]} |" for name in different]
        missing: dict[str, list[str]] = {}
        for name in names:
            if name not in there:
                use = next(use for pattern, use in INSTEAD if re.fullmatch(pattern, f"{module}.{name}"))
                missing.setdefault(use, []).append(f"`{name}`")
        if missing:
            lines += ["", "| not there | use |", "| --- | --- |"]
            lines += [f"| {', '.join(names)} | {use} |" for use, names in missing.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
