"""What `make train` does, written out: copy it and put in your own model, loss and data.

python examples/train_contrastive.py CONFIG [key=value ...]                        # one process
fleetrun --nproc_per_node 2 examples/train_contrastive.py CONFIG [key=value ...]   # two ranks
"""

import sys
from functools import partial

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_recompute import (
    ContrastiveLoss,
    GradCache,
    TrainStep,
    apply_recompute,
    build_model,
    load_config,
)
from paddle_recompute.app.data import build_loader, prepare_data
from paddle_recompute.app.retrieval.evaluation import encode_batches, retrieval_metrics
from paddle_recompute.distributed import barrier, broadcast_from_rank0
from paddle_recompute.train_step import build_optimizer, build_schedule

dist.init_parallel_env()
rank, num_ranks = dist.get_rank(), dist.get_world_size()
config = load_config(sys.argv[1], [*sys.argv[2:], f"launch.num_ranks={num_ranks}"])
train, batch, part = config.train, config.local_batch, config.micro_batch
longest = {"query": config.data.max_query_tokens, "positive": config.data.max_positive_tokens}
prompts = config.model.prompts
data = prepare_data(config, rank, barrier)
loader = build_loader(config, data, rank)

paddle.seed(train.seed)
model = build_model(config.model, data.tokenizer.vocab_size)
broadcast_from_rank0(model)
print(apply_recompute(model, config.recompute))
section = config.contrastive
if section.memory_budget or section.mask_false_negatives or section.hard_negatives:
    sys.exit("memory_budget, mask_false_negatives and hard_negatives: `paddle-recompute train`")
contrastive = ContrastiveLoss(
    section.temperature,
    section.symmetric,
    section.negatives,
    learnable_temperature=section.learnable_temperature,
    label_smoothing=section.label_smoothing,
    tile=section.tile,
    normalize=True,
)
how = {"loss_fn": lambda model, pairs: contrastive(*(model(pairs[side]) for side in longest))}
if section.is_chunked:
    size, tokens = section.chunk_size, section.chunk_tokens
    how = {"grad_cache": GradCache(model, contrastive, chunk_size=size, chunk_tokens=tokens)}
schedule = build_schedule(
    config.learning_rate, train.max_steps, warmup_steps=train.warmup_steps, decay=train.decay
)
train_step = TrainStep(
    model,
    build_optimizer(config.optimizer, model, schedule, contrastive.parameters()),
    accumulate_steps=batch // part,
    clip_grad_norm=train.clip_grad_norm,
    **how,
)
for step in range(train.max_steps):
    if step % len(loader) == 0:
        loader.set_epoch(step // len(loader))
        batches = iter(loader)
    pairs = next(batches)
    rows = [slice(first, first + part) for first in range(0, batch, part)]
    result = train_step([{side: pairs[side][some] for side in longest} for some in rows])
    schedule.step()
    print(f"step {step + 1}  loss {result.loss:.4f}")
if rank == 0:
    encode = partial(encode_batches, model, data.tokenizer, batch_size=train.eval_batch)
    query = encode(
        [pair.query for pair in data.valid], max_tokens=longest["query"], prompt=prompts[0]
    )
    pool = encode(data.pool, max_tokens=longest["positive"], prompt=prompts[1])
    places = np.array([data.pool.index(pair.positive) for pair in data.valid])
    print(retrieval_metrics(query, pool, places))
    paddle.save(model.state_dict(), str(train.output_dir / "model.pdparams"))
