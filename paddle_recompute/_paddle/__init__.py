"""Everything that differs between Paddle versions, and every private Paddle name that we use.

No other module of the package looks at a version number or reaches into ``paddle.base``. Each
function names the Paddle versions that it serves, why a public API does not, and when it can go.
``tests/test_paddle_private.py`` names each private symbol, so a release that moves one is noticed.
"""

from paddle_recompute._paddle.amp import (
    AmpState,
    amp_off,
    amp_state,
    amp_state_of,
    operator_names,
)
from paddle_recompute._paddle.backward import (
    Backward,
    after_each_backward,
    at_end_of_backward,
    current_backward,
    hand_on,
    is_raised_by_an_operator,
    watch_backward,
)
from paddle_recompute._paddle.distributed import (
    FLAGS_SET_BY_PADDLE,
    all_reduce_numbers,
    init_parallel_env,
    is_from_gloo,
    make_device_group,
    make_gloo_group,
    master_host,
    store_await,
    store_publish,
    without_own_flags,
)
from paddle_recompute._paddle.fleet_recompute import (
    FORWARDS_TO_FLEET,
    custom_state_functions,
    fleet_recompute,
    fleet_recompute_hybrid,
    holders_of,
)
from paddle_recompute._paddle.gradients import (
    has_unwatched_hooks,
    keeps_main_grad,
    leaves_with_hooks,
    make_unscaling_visible,
    muted_leaf_hooks,
    on_gradient_added,
    watch_leaf_hooks,
)
from paddle_recompute._paddle.guarded import gradient_of
from paddle_recompute._paddle.host_counters import (
    can_reset_host_memory_peak,
    host_memory,
    reset_host_memory_peak,
)
from paddle_recompute._paddle.layers import (
    BATCH_NORMS,
    attributes_of_every_layer,
    children_of,
    clip_of_optimizer,
    forward_post_hooks,
    forward_pre_hooks,
    is_initialized,
    is_parameter,
    non_trained_state,
    own_parameters,
    own_sublayers,
    parameters_of_optimizer,
    set_own_parameters,
    statistics_among_parameters,
    watch_layers,
)
from paddle_recompute._paddle.native_calls import end_native_calls, native_call
from paddle_recompute._paddle.random_streams import (
    generator_states,
    hybrid_parallel_tracker,
    mark_of_generator_state,
    set_generator_states,
)
from paddle_recompute._paddle.saved_tensors import (
    PACK_LEAKS_A_REFERENCE,
    Layout,
    before_saved_tensors_hooks,
    give_back_pack_references,
    layout_of,
    shares_memory,
    with_layout,
)
from paddle_recompute._paddle.translation import (
    never_translate,
    never_translate_files_below,
    set_translator,
)
from paddle_recompute._paddle.updates import (
    clips_gradients,
    keeps_master_weights,
)
from paddle_recompute._paddle.version import (
    NEWEST_KNOWN,
    OLDEST_SUPPORTED,
    is_dygraph,
    paddle_version,
)
from paddle_recompute._paddle.writes import address_of, watch_writes

__all__ = [
    "BATCH_NORMS",
    "FLAGS_SET_BY_PADDLE",
    "FORWARDS_TO_FLEET",
    "NEWEST_KNOWN",
    "OLDEST_SUPPORTED",
    "PACK_LEAKS_A_REFERENCE",
    "AmpState",
    "Backward",
    "Layout",
    "address_of",
    "after_each_backward",
    "all_reduce_numbers",
    "amp_off",
    "amp_state",
    "amp_state_of",
    "at_end_of_backward",
    "attributes_of_every_layer",
    "before_saved_tensors_hooks",
    "can_reset_host_memory_peak",
    "children_of",
    "clip_of_optimizer",
    "clips_gradients",
    "current_backward",
    "custom_state_functions",
    "end_native_calls",
    "fleet_recompute",
    "fleet_recompute_hybrid",
    "forward_post_hooks",
    "forward_pre_hooks",
    "generator_states",
    "give_back_pack_references",
    "gradient_of",
    "hand_on",
    "has_unwatched_hooks",
    "holders_of",
    "host_memory",
    "hybrid_parallel_tracker",
    "init_parallel_env",
    "is_dygraph",
    "is_from_gloo",
    "is_initialized",
    "is_parameter",
    "is_raised_by_an_operator",
    "keeps_main_grad",
    "keeps_master_weights",
    "layout_of",
    "leaves_with_hooks",
    "make_device_group",
    "make_gloo_group",
    "make_unscaling_visible",
    "mark_of_generator_state",
    "master_host",
    "muted_leaf_hooks",
    "native_call",
    "never_translate",
    "never_translate_files_below",
    "non_trained_state",
    "on_gradient_added",
    "operator_names",
    "own_parameters",
    "own_sublayers",
    "paddle_version",
    "parameters_of_optimizer",
    "reset_host_memory_peak",
    "set_generator_states",
    "set_own_parameters",
    "set_translator",
    "shares_memory",
    "statistics_among_parameters",
    "store_await",
    "store_publish",
    "watch_backward",
    "watch_layers",
    "watch_leaf_hooks",
    "watch_writes",
    "with_layout",
    "without_own_flags",
]
