"""Generate text with the byte-level GPT, from the checkpoint that `train_gpt.py` left, with sharded parameters.

    python examples/generate.py --prompt "class Queue"          stage 3, all GPUs or 8 simulated devices
    python examples/generate.py --temperature 0 --bytes 50      always takes the likeliest byte
    python examples/generate.py --stage 0 --devices 1           another stage, another number of devices

Pass the model size and the folder `--out` of the run. Keys and values of past bytes are cached. Each device gathers
the parameters of one layer at a time.
"""

import argparse

import jax
from train_gpt import mesh_of, model_of, options, positive, resume, transformation, written

from zerojax.checkpoint import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="def ", metavar="TEXT", help="text to continue (default: %(default)r)")
    parser.add_argument("--bytes", type=positive, default=400, help="bytes to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: not random (default: %(default)s)")
    args = options(parser)
    if not args.prompt:
        parser.error("--prompt is empty: give a byte at least")
    if not (args.out / "checkpoints").is_dir():
        raise SystemExit(f"There is no checkpoint in {args.out}. Run examples/train_gpt.py first, or give its --out.")
    tx = transformation(
        args, mesh_of(args.devices, args.tensor_parallel), args.stage
    )  # first, because it sets the number of simulated devices
    model, init = model_of(args)
    with Checkpointer(args.out / "checkpoints", read_only=True) as checkpoints:
        state, _, _ = resume(tx.create(jax.eval_shape(init)), checkpoints)
    print(written(tx, model, state, args.prompt, args.bytes, temperature=args.temperature))


if __name__ == "__main__":
    main()
