"""Draws the accept lengths of rollouts while a policy is trained, with a frozen, a following and no draft.

python benchmarks/rollouts.py benchmarks/results/2026-11-29-h200-rollouts.jsonl docs/images/rollouts.svg
"""

import argparse
from pathlib import Path

import recorded

DRAFTS = {"none": "C7", "frozen": "C1", "following": "C0"}


def main() -> None:
    """Draws a line per draft, and the reward below."""
    parser = argparse.ArgumentParser(description="Draws accept lengths over the steps of a policy.")
    parser.add_argument("measurements", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rollouts"  # the same file each time
    from matplotlib import pyplot

    steps = {(line.mode, line.metric): line.values for line in recorded.read(options.measurements) if line.values[1:]}
    (rewards,) = (values for (_, metric), values in steps.items() if metric == "reward")
    lengths = {name: steps.get((name, "accept length"), [1.0] * len(rewards)) for name in DRAFTS}
    page, (above, below) = pyplot.subplots(
        2, 1, figsize=(6, 4.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    for name, color in DRAFTS.items():
        above.plot(lengths[name], color=color, label=f"{name} draft" if name != "none" else "no draft")
    above.set(ylabel="accept length", ylim=(0.9, None))
    above.legend(frameon=False)
    below.plot(rewards, color="C2")
    below.set(xlabel="step of the policy", ylabel="reward", ylim=(0, 1.05))
    page.savefig(options.picture, metadata={"Date": None} if options.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
