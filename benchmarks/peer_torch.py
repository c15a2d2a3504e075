"""Train in torch for `peers.py`: the yardstick's GPT under DDP, FSDP2 and DeepSpeed's ZeRO-3.

Torch runs eagerly. Blocks are rematerialised (`checkpoint_wrapper`, not reentrant), and AdamW is torch's fused one.
FSDP2 shards per block and at the root, DDP's gradients are views of its buckets, and DeepSpeed has its defaults except
for clipping.
"""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peer_model import ADAMW, EPSILON, to_torch, tokens_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

WAYS = ("ddp", "fsdp2", "deepspeed")
BATCHES = 16


class Block(nn.Module):
    """`yardstick.Block`: its modules bear the same names."""

    def __init__(self, width, head):
        super().__init__()
        self.head = head
        self.LayerNorm_0, self.LayerNorm_1 = (nn.LayerNorm(width, eps=EPSILON) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.Dense_0, self.Dense_1 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.LayerNorm_0(x)
        q, k, v = (module(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for module in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.Dense_0(self.LayerNorm_1(x))
        return x + self.Dense_1(F.gelu(h, approximate="tanh"))


class GPT(nn.Module):
    """`yardstick.GPT`: the mean cross-entropy of each token but the first."""

    def __init__(self, size):
        super().__init__()
        self.Embed_0 = nn.Embedding(size["vocabulary"], size["width"])
        self.blocks = nn.ModuleList(Block(size["width"], size["head"]) for _ in range(size["layers"]))
        self.LayerNorm_0 = nn.LayerNorm(size["width"], eps=EPSILON)

    def forward(self, tokens):
        x = self.Embed_0(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.LayerNorm_0(x), self.Embed_0.weight)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten().long())


def model_of(size, weights):
    """The model with the weights of record, its blocks rematerialised."""
    model = GPT(size)
    model.load_state_dict({name: torch.from_numpy(leaf) for name, leaf in to_torch(weights).items()})
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


class Trainer:
    """One rank; `step(i)` is the loss of its own rows of the i-th batch."""

    def __init__(self, way, size, weights, *, rank, workers):
        self.device = torch.device("cuda", rank) if size["gpu"] else torch.device("cpu")
        if size["gpu"]:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        self.bf16, self.way = size["gpu"], way
        backend = "nccl" if size["gpu"] else "gloo"
        if way == "deepspeed":
            import deepspeed

            deepspeed.init_distributed(dist_backend=backend)
        else:
            dist.init_process_group(backend)
        made = {"rows": size["rows"] * workers, "length": size["tokens"], "vocabulary": size["vocabulary"]}
        own = slice(rank * size["rows"], (rank + 1) * size["rows"])
        whole = (tokens_of(i, **made)[own] for i in range(BATCHES))
        self.batches = [torch.from_numpy(np.ascontiguousarray(rows)).to(self.device) for rows in whole]
        model = model_of(size, weights).to(self.device)
        self.model = getattr(self, way)(model)

    def adamw(self, model):
        betas = {"betas": (ADAMW["b1"], ADAMW["b2"]), "lr": ADAMW["learning_rate"]}
        same = {name: ADAMW[name] for name in ("eps", "weight_decay")}
        return torch.optim.AdamW(model.parameters(), **betas, **same, fused=True)

    def ddp(self, model):
        ids = [self.device.index] if self.bf16 else None
        model = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        self.optimizer = self.adamw(model)
        return model

    def fsdp2_offload(self, model):
        """FSDP2 with parameters, gradients and optimizer in host memory; not among the ways of `peers.py`."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        return self.fsdp2(model, offload_policy=CPUOffloadPolicy(pin_memory=self.bf16))

    def fsdp2_compiled(self, model):
        """FSDP2 with each block compiled by torch, as torchtitan does it; not among the ways of `peers.py`."""
        for block in model.blocks:
            block.compile()
        return self.fsdp2(model)

    def fsdp2(self, model, **policy):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy |= {"mp_policy": half} if self.bf16 else {}
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
        self.optimizer = self.adamw(model)
        return model

    def deepspeed(self, model):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": len(self.batches[0]),
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # which is 1.0 unless said, and the only one of these to change the losses
            "bf16": {"enabled": self.bf16},
        }
        return deepspeed.initialize(model=model, optimizer=self.adamw(model), config=config)[0]

    def step(self, number):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16 and self.way == "ddp"):
            loss = self.model(self.batches[number % BATCHES])
        if self.way == "deepspeed":
            self.model.backward(loss)
            self.model.step()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()  # what a GPU has still to do is waited for by `wait`

    def wait(self):
        if self.bf16:
            torch.cuda.synchronize()

    def device_peak(self):
        """Bytes this rank's GPU held; None on a CPU."""
        return torch.cuda.max_memory_allocated() if self.bf16 else None

    def begin_peak(self):
        """Forget the peak of earlier trainers."""
        if self.bf16:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def end(self):
        if dist.is_initialized() and self.way != "deepspeed":
            dist.destroy_process_group()
