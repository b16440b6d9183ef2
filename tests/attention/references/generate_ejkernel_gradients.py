#!/usr/bin/env python3
"""Makes the fixtures gradients/ejkernel_*: gradients on the XLA platform of ejkernel, on the CPU.

    python3 -m pip install -r requirements.txt
    python3 generate_ejkernel_gradients.py

These are the cases in which ejkernel's own tests of attention, flash_attention and ring_attention on
that platform take gradients, with shorter sequences, and with another loss: the tensors are named as
in generate_jax_gradients.py.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

# pylint: disable=wrong-import-position
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.attention._xla_impl_fwd import attention as materialised_attention
from ejkernel.kernels._xla.flash_attention import flash_attention
from ejkernel.kernels._xla.ring_attention import ring_attention
from ejkernel.ops import FwdParams

import fixture
from fixture import HERE, Shape, generator, operands, save

fixture.CASES = HERE / "gradients"
SHAPE = Shape(batch=1, rows=16, heads=2, kv_heads=2, dim=4)
BLOCKS = FwdParams(q_blocksize=8, kv_blocksize=8)


def attention(query: jax.Array, key: jax.Array, value: jax.Array, **arguments: Any) -> jax.Array:
    """The function that materialises all the weights; by default it computes in bfloat16."""
    return materialised_attention(query, key, value, dtype=query.dtype, **arguments)[0]


def differentiate(case: str, says: str, attend: Callable[..., jax.Array], *,
                  sinks: np.ndarray | None = None, options: dict[str, Any] | None = None,
                  **arguments: Any) -> None:
    inputs = operands(case, SHAPE)
    if sinks is not None:
        inputs["sinks"] = sinks

    def attend_to(tensors: dict[str, jax.Array]) -> jax.Array:
        given = {"softmax_aux": tensors["sinks"]} if sinks is not None else {}
        return attend(tensors["query"], tensors["key"], tensors["value"], **given, **arguments)

    output, pullback = jax.vjp(attend_to, {name: jnp.asarray(one) for name, one in inputs.items()})
    grad_output = generator(case + " upstream").standard_normal(output.shape).astype(np.float32)
    (gradients,) = pullback(jnp.asarray(grad_output))
    # flash_attention takes its sinks for constants.
    assert not np.any(gradients.pop("sinks", 0))
    save(case, says, f"jax.vjp of ejkernel {attend.__name__}, XLA",
         {**inputs, "output": np.asarray(output), "grad_output": grad_output,
          **{f"grad_{name}": np.asarray(one) for name, one in gradients.items()}},
         options=options)


def main() -> None:
    """All cases."""
    fixture.CASES.mkdir(exist_ok=True)
    two = generator("ejkernel gradients").standard_normal(2).astype(np.float32)
    differentiate("ejkernel_window", "A window with one number for both sides", attention,
                  sliding_window=6, options={"window": [6]})
    differentiate("ejkernel_window_asymmetric", "A window, longer to the left", attention,
                  sliding_window=(9, 3), options={"window": [9, 3]})
    differentiate("ejkernel_flash", "No mask, two key blocks", flash_attention, fwd_params=BLOCKS)
    differentiate("ejkernel_flash_soft_cap", "A soft cap", flash_attention, logits_soft_cap=2.0,
                  options={"soft-cap": 2.0})
    differentiate("ejkernel_flash_sinks", "Two sinks for all heads, one key block", flash_attention,
                  sinks=two)
    differentiate("ejkernel_flash_all", "A window, a soft cap and sinks", flash_attention, sinks=two,
                  sliding_window=(7, 7), logits_soft_cap=2.0,
                  options={"window": [7], "soft-cap": 2.0})
    differentiate("ejkernel_ring", "A ring of one device, two key blocks", ring_attention,
                  fwd_params=BLOCKS)
    differentiate("ejkernel_ring_window", "A window and a soft cap", ring_attention,
                  sliding_window=7, logits_soft_cap=2.0, fwd_params=BLOCKS,
                  options={"window": [7], "soft-cap": 2.0})


if __name__ == "__main__":
    main()
