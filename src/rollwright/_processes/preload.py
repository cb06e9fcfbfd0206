"""What the fork server imports once, so that the processes that it forks need not."""

import torch

torch.set_num_threads(1)  # before anything computes: threads do not survive a fork

import gymnasium  # noqa: E402, F401
import tensordict.nn  # noqa: E402, F401

import rollwright.collectors  # noqa: E402
import rollwright.data  # noqa: E402
import rollwright.envs  # noqa: E402, F401
