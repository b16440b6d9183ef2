#!/usr/bin/env python3
"""Times ring attention written in JAX, bfloat16: shard_map, ppermute and cuDNN kernels.

    python3 jax_ring.py --gpus 4 --case 64/8:causal:32k
    JAX_COORDINATOR_ADDRESS=localhost:7000 torchrun --nproc-per-node 4 jax_ring.py --annulus --case 64/8:causal:32k

One process drives all GPUs; under torchrun, each process drives one. With --annulus, which needs a
process for each GPU, annulus.jax is timed in the same way, but its two passes only together.

Each GPU holds one contiguous chunk of the sequence. Key/value chunks go round the ring while a GPU
computes on the chunk before, and partial results are merged in float32. Under
a causal mask a GPU skips the chunks that lie in its future. In the backward pass, cuDNN gets the
whole rows' output and log-sum-exp for every chunk, and float32 sums of the key/value gradients
follow their chunks round the ring. A call ends when every GPU has its part of the results.
"""

import argparse
import functools
import math
import os
import time
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peer_cases import Case, peer_parser, print_error, print_line, print_times

try:
    from jax import shard_map
except ImportError:  # before JAX 0.6
    from jax.experimental.shard_map import shard_map

SYSTEM = "jax-ring"
AXIS = "sp"
BY_SEQUENCE = PartitionSpec(None, AXIS, None, None)  # of [batch, sequence, heads, head dim]
LSE_BY_SEQUENCE = PartitionSpec(None, None, AXIS)

State = tuple[jax.Array, jax.Array]  # output [b,t,n,d] and log-sum-exp [b,n,t], float32


def mask_type(causal: bool) -> cudnn.MaskType:
    return cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK


def attend(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> State:
    """One chunk of key/value, by the function behind jax.nn.dot_product_attention, which rounds its
    log-sum-exp to bfloat16."""
    output, lse = cudnn.dot_product_attention(
        query, key, value, scale=query.shape[-1]**-0.5, mask_type=mask_type(causal),
        return_residual=True)
    return output.astype(jnp.float32), lse


def differentiate(query: jax.Array, key: jax.Array, value: jax.Array, output: jax.Array,
                  lse: jax.Array, grad_output: jax.Array,
                  causal: bool) -> tuple[jax.Array, ...]:
    """One chunk's part of the gradients, from results over all chunks, by the rule behind the
    gradients of jax.nn.dot_product_attention."""
    none = jnp.zeros(0, query.dtype)
    residuals = (query, key, value, *(none,) * 7, lse, output)
    gradients = cudnn._dot_product_attention_bwd_rule(
        query.shape[-1]**-0.5, 42, 0.0, (False, False), mask_type(causal), cudnn.AttentionLayout.BTNH.value,
        None, cudnn.check_cudnn_version(), False, residuals, grad_output)
    return tuple(gradient.astype(jnp.float32) for gradient in gradients[:3])


def merge(first: State, second: State) -> State:
    """Merges two results over different keys. Every row must see at least one key of each."""
    lse = jnp.logaddexp(first[1], second[1])
    share = jnp.exp(first[1] - lse).transpose(0, 2, 1)[..., None]
    return share * first[0] + (1 - share) * second[0], lse


def onward(arrays: Any, gpus: int) -> Any:
    """Sends arrays to the next GPU of the ring."""
    ring = [(gpu, (gpu + 1) % gpus) for gpu in range(gpus)]
    return jax.tree.map(lambda array: lax.ppermute(array, AXIS, ring), arrays)


def when_visible(hop: int, causal: bool, compute: Callable[[Any], Any], otherwise: Any) -> Any:
    """compute(otherwise) if the chunk is visible, else `otherwise`. After h hops, a GPU has the chunk
    of the GPU h places before it, or a later chunk, which is hidden."""
    if not causal:
        return compute(otherwise)
    return lax.cond(lax.axis_index(AXIS) >= hop, compute, lambda before: before, otherwise)


def ring_state(query: jax.Array, key: jax.Array, value: jax.Array, *, gpus: int,
               causal: bool) -> State:
    """Output and log-sum-exp of one GPU's queries over the whole sequence; the body of a
    shard_map."""
    travelling = (key, value)
    state = attend(query, key, value, causal)
    for hop in range(1, gpus):
        travelling = onward(travelling, gpus)
        chunk = travelling
        state = when_visible(
            hop, causal,
            lambda before, chunk=chunk: merge(before, attend(query, *chunk, False)), state)
    return state[0].astype(query.dtype), state[1]


def ring_attention(*operands: jax.Array, gpus: int, causal: bool) -> jax.Array:
    """The output alone."""
    return ring_state(*operands, gpus=gpus, causal=causal)[0]


def ring_gradients(query: jax.Array, key: jax.Array, value: jax.Array, output: jax.Array,
                   lse: jax.Array, grad_output: jax.Array, *, gpus: int,
                   causal: bool) -> tuple[jax.Array, ...]:
    """Gradients of one GPU's queries, keys and values; the body of a shard_map."""
    rows = (output, lse, grad_output)
    travelling = (key, value)
    grad_query, *sums = differentiate(query, key, value, *rows, causal)
    for hop in range(1, gpus):
        travelling, sums = onward((travelling, sums), gpus)
        chunk = travelling

        def add(before: Any, chunk: tuple[jax.Array, ...] = chunk) -> Any:
            return jax.tree.map(jnp.add, before, differentiate(query, *chunk, *rows, False))

        grad_query, *sums = when_visible(hop, causal, add, (grad_query, *sums))
    if gpus > 1:
        sums = onward(sums, gpus)  # the last hop brings each sum home
    return tuple(gradient.astype(query.dtype) for gradient in (grad_query, *sums))


class Ring:
    """A case on a mesh."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        def jitted(body: Callable, inputs: tuple, outputs: Any) -> Callable:
            bound = functools.partial(body, gpus=mesh.size, causal=case.causal)
            return jax.jit(shard_map(bound, mesh=mesh, in_specs=inputs, out_specs=outputs,
                                     check_vma=False))

        operands = (BY_SEQUENCE,) * 3
        self.attend = jitted(ring_attention, operands, BY_SEQUENCE)
        self.state = jitted(ring_state, operands, (BY_SEQUENCE, LSE_BY_SEQUENCE))
        self.differentiate = jitted(
            ring_gradients, (*operands, BY_SEQUENCE, LSE_BY_SEQUENCE, BY_SEQUENCE), operands)


class Annulus:
    """The case by annulus.jax."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        import annulus.jax

        self.attend = jax.jit(shard_map(
            lambda *operands: annulus.jax.attention(
                *operands, causal=case.causal, layout="zigzag" if case.causal else "contiguous")[0],
            mesh=mesh, in_specs=(BY_SEQUENCE,) * 3, out_specs=BY_SEQUENCE))
        self.both = jax.jit(lambda *operands, grad_output: jax.vjp(
            self.attend, *operands)[1](grad_output))


def time_calls(call: Callable[[], Any], options: argparse.Namespace) -> list[float]:
    """Milliseconds of each timed call."""

    def timed() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(call())
        return (time.perf_counter() - begin) * 1e3

    timed()  # compiles
    calls = max(options.warmup, math.ceil(options.warm_seconds / (timed() * 1e-3)))
    if jax.process_count() > 1:  # all make the same number
        calls = int(multihost_utils.broadcast_one_to_all(np.int32(calls)))
    for _ in range(calls):
        timed()
    return [timed() for _ in range(options.iters)]


def time_case(make: type, case: Case, mesh: Mesh,
              options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of the timed calls, by what was timed."""
    sharding = NamedSharding(mesh, BY_SEQUENCE)

    def normal(seed: int, heads: int) -> jax.Array:
        shape = (options.batch, case.length, heads, case.head_dim)
        draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16),
                       out_shardings=sharding)
        return draw(jax.random.PRNGKey(seed))

    operands = normal(0, case.heads), normal(1, case.kv_heads), normal(2, case.kv_heads)
    ring = make(case, mesh)
    times = {"forward": time_calls(lambda: ring.attend(*operands), options)}
    if options.backward:
        grad_output = normal(3, case.heads)
        if isinstance(ring, Annulus):
            times["both"] = time_calls(lambda: ring.both(*operands, grad_output=grad_output), options)
            return times
        state = ring.state(*operands)
        times["backward"] = time_calls(
            lambda: ring.differentiate(*operands, *state, grad_output), options)
        times["both"] = time_calls(
            lambda: ring.differentiate(*operands, *ring.state(*operands), grad_output), options)
    return times


def write_gradients(case: Case, mesh: Mesh, folder: str) -> None:
    """The gradients of the tensors in the folder; see gradient_files.py."""
    import gradient_files

    sharding = NamedSharding(mesh, BY_SEQUENCE)
    *operands, grad_output = [jax.device_put(jnp.asarray(array, jnp.bfloat16), sharding)
                              for array in gradient_files.read_operands(folder).values()]
    ring = Ring(case, mesh)
    found = ring.differentiate(*operands, *ring.state(*operands), grad_output)
    gradient_files.write(folder, SYSTEM, mesh.size,
                    [np.asarray(gradient.astype(jnp.float32)) for gradient in found])


def main() -> None:
    parser = peer_parser("Ring attention in JAX; one process drives all GPUs")
    parser.add_argument("--gpus", type=int, help="how many GPUs (default: all that are visible)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # Annulus needs memory, too
        jax.distributed.initialize(
            num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"]),
            local_device_ids=[int(os.environ["LOCAL_RANK"])])
    devices = jax.devices("gpu")
    gpus = options.gpus or len(devices)
    if gpus > len(devices):
        parser.error(f"--gpus: got {gpus}; expected at most {len(devices)}, the visible ones")
    mesh = Mesh(np.array(devices[:gpus]), (AXIS,))
    reports = jax.process_index() == 0
    if reports:
        print_line(environment={
            "jax": jax.__version__, "platform": devices[0].client.platform_version.splitlines()[0],
            "gpus": [device.device_kind for device in devices[:gpus]]})
    makers = {SYSTEM: Ring} | ({"annulus-jax": Annulus} if options.annulus else {})
    for case in options.cases:
        for name, make in makers.items():
            try:
                if options.tensors:
                    write_gradients(case, mesh, options.tensors)
                    continue
                times = time_case(make, case, mesh, options)
                if reports:
                    print_times(name, case, options, gpus, times)
            # If XLA or cuDNN fail on one case, the others are still timed.
            except Exception as error:
                if reports:
                    print_error(name, case, error)


if __name__ == "__main__":
    main()
