"""PPO on Brax: a thousand environments of JAX and a network of torch on one device, and no copies between the two.

    python examples/ppo_brax.py --env ant --num-envs 2048 --device cuda

The learning is that of examples/ppo_vmas.py, on the names that Brax's entries have. Needs
``pip install 'rollwright[brax]'``; on a GPU, set ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` to leave memory to torch.
"""

from __future__ import annotations

import argparse
import time

from ppo_vmas import Keys, train

from rollwright.envs import BraxEnv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="inverted_pendulum")
    parser.add_argument("--backend", default="spring", help="'mjx' is MuJoCo's own physics")
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--total-frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    begun = time.perf_counter()
    env = BraxEnv(given.env, given.num_envs, device=given.device, backend=given.backend)
    keys = Keys(("observation",), ("action",), ("reward",))
    rewards = train(env, keys, given.seed, given.total_frames, given.device)
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f} in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
