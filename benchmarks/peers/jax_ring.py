#!/usr/bin/env python3
"""Times ring attention written in JAX, forward, bfloat16: shard_map, ppermute and cuDNN kernels.

    python3 jax_ring.py --gpus 4 --case 64/8:causal:32k

One process drives all GPUs. Each holds one contiguous chunk of the sequence; key/value chunks go
round the ring while the one before is computed on, and partial results are merged in float32. Under
a causal mask a GPU skips the chunks that lie in its future. A call ends when every GPU has its part
of the output.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peer_cases import Case, peer_parser, print_error, print_line, print_times

try:
    from jax import shard_map
except ImportError:  # before JAX 0.6
    from jax.experimental.shard_map import shard_map

SYSTEM = "jax-ring"
AXIS = "sequence"
BY_SEQUENCE = PartitionSpec(None, AXIS, None, None)  # of [batch, sequence, heads, head dim]

State = tuple[jax.Array, jax.Array]  # output [b,t,n,d] and log-sum-exp [b,t,n], float32


def attend(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> State:
    """One chunk of key/value."""
    output, lse = jax.nn.dot_product_attention(query, key, value, is_causal=causal,
                                               implementation="cudnn", return_residual=True)
    return output.astype(jnp.float32), lse


def merge(first: State, second: State) -> State:
    """The result over the keys of both; every row sees at least one key in each."""
    lse = jnp.logaddexp(first[1], second[1])
    share = jnp.exp(first[1] - lse)[..., None]
    return share * first[0] + (1 - share) * second[0], lse


def ring_attention(query: jax.Array, key: jax.Array, value: jax.Array, *, gpus: int,
                   causal: bool) -> jax.Array:
    """Attention of one GPU's queries over the whole sequence; the body of the shard_map."""
    here = lax.axis_index(AXIS)
    onward = [(gpu, (gpu + 1) % gpus) for gpu in range(gpus)]
    travelling = (key, value)
    state: State | None = None
    for hop in range(gpus):
        arrived = travelling
        if hop + 1 < gpus:
            travelling = jax.tree.map(lambda chunk: lax.ppermute(chunk, AXIS, onward), arrived)
        if state is None:
            state = attend(query, *arrived, causal)
            continue

        def absorb(before: State, chunk: tuple[jax.Array, jax.Array] = arrived) -> State:
            return merge(before, attend(query, *chunk, False))

        # After h hops this GPU has the chunk of the GPU h places before it, or a later one, which
        # is hidden.
        state = lax.cond(here >= hop, absorb, lambda before: before, state) if causal \
            else absorb(state)
    assert state is not None
    return state[0].astype(query.dtype)


def time_case(case: Case, mesh: Mesh, options: argparse.Namespace) -> list[float]:
    """Milliseconds of each timed call."""
    sharding = NamedSharding(mesh, BY_SEQUENCE)

    def normal(seed: int, heads: int) -> jax.Array:
        shape = (options.batch, case.length, heads, options.head_dim)
        draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16),
                       out_shardings=sharding)
        return draw(jax.random.PRNGKey(seed))

    operands = normal(0, case.heads), normal(1, case.kv_heads), normal(2, case.kv_heads)
    body = functools.partial(ring_attention, gpus=mesh.size, causal=case.causal)
    call = jax.jit(shard_map(body, mesh=mesh, in_specs=(BY_SEQUENCE,) * len(operands),
                             out_specs=BY_SEQUENCE, check_vma=False))
    for _ in range(options.warmup + 1):  # the first one compiles
        call(*operands).block_until_ready()
    times = []
    for _ in range(options.iters):
        begin = time.perf_counter()
        call(*operands).block_until_ready()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def main() -> None:
    parser = peer_parser("Ring attention in JAX; one process drives all GPUs")
    parser.add_argument("--gpus", type=int, help="how many GPUs (default: all that are visible)")
    options = parser.parse_args()
    devices = jax.devices("gpu")
    gpus = options.gpus or len(devices)
    if gpus > len(devices):
        parser.error(f"--gpus: got {gpus}; expected at most {len(devices)}, the visible ones")
    mesh = Mesh(np.array(devices[:gpus]), (AXIS,))
    print_line(environment={
        "jax": jax.__version__, "platform": devices[0].client.platform_version.splitlines()[0],
        "gpus": [device.device_kind for device in devices[:gpus]]})
    for case in options.cases:
        try:
            print_times(SYSTEM, case, options, gpus, time_case(case, mesh, options))
        # If XLA or cuDNN fail on one case, the others are still timed.
        except Exception as error:
            print_error(SYSTEM, case, error)


if __name__ == "__main__":
    main()
