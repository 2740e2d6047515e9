"""The state of an optimizer, spread over the ranks (ZeRO stage 1), to the bit.

Each trained parameter has one owner (`parts_of_owners`), whose optimizer alone has its moments.
`GradientSync` gives every rank all gradients, as without sharding; `ShardedOptimizer` updates what
this rank owns, and the new values are gathered from their owners (`_all_gather`). For a
checkpoint the state is gathered tensor by tensor: it is that of the replicated run.
"""

from paddle_recompute.sharding.optimizer import ShardedOptimizer, inner_of

__all__ = ["ShardedOptimizer", "inner_of"]
