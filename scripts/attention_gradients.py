"""The gradients of check_attention.py: dQ, dK and dV in float64, beside their bounds.

With P the probabilities, Z the factors of dropout (0 or 1/(1 - p)), delta = rowsum(dO o O) - dLSE
and c the factor of the soft cap (docs/semantics.md, "Gradients"):

    dV = (P o Z)^T dO     dP = (dO V^T) o Z     dS = c o P o (dP - delta)
    dQ = scale dS K       dK = scale dS^T Q

The error of a whole gradient may be twice the output's bound times the norm of the gradient that
has P o (|dP| + |delta|) in place of P o (dP - delta), and absolute values of the other factor.
"""

import numpy as np

NAMES = ("query", "key", "value")


class Gradients:
    """Sums over rows and query heads, block by block, and the results to compare them with."""

    def __init__(self, found, grad_output, grad_lse):
        """found: {"query": array [B,T,N,D] or None, ...}; grad_lse: [B,N,T] or None."""
        self.found = {name: array for name, array in found.items() if array is not None}
        self.grad_output, self.grad_lse = grad_output, grad_lse
        self.errors = dict.fromkeys(self.found, 0.0)      # squares
        self.magnitudes = dict.fromkeys(self.found, 0.0)  # squares

    def _compare(self, name, index, true, magnitude, widened):
        if name in self.found:
            self.errors[name] += float(np.sum((widened(self.found[name][index]) - true) ** 2))
            self.magnitudes[name] += float(np.sum(magnitude**2))

    def begin_kv_head(self, key, value):
        self.key, self.value = key, value
        self.grad_key, self.grad_value = ([np.zeros(x.shape), np.zeros(x.shape)]
                                          for x in (key, value))

    def add_rows(self, problem, b, n, parts, widened):
        """Rows of one query head, of which Problem.probabilities has returned `parts`."""
        rows, columns = slice(*parts.rows), slice(*parts.columns)
        key, value, query = self.key[columns], self.value[columns], parts.query
        grad_output = widened(self.grad_output[b, rows, n])
        weights = parts.probabilities * parts.kept
        delta = np.sum(grad_output * (weights @ value), axis=1)
        if self.grad_lse is not None:
            delta -= self.grad_lse[b, n, rows].astype(np.float64)
        grad_probability = (grad_output @ value.T) * parts.kept
        factor = parts.probabilities * problem.scale
        if problem.soft_cap is not None:
            factor = factor * (1 - (parts.capped / problem.soft_cap) ** 2)
        of_logits = factor * (grad_probability - delta[:, None])
        magnitude = np.abs(factor) * (np.abs(grad_probability) + np.abs(delta)[:, None])
        self._compare("query", (b, rows, n), of_logits @ key, magnitude @ np.abs(key), widened)
        for total, of_key, of_value in (
                (0, of_logits.T @ query, weights.T @ grad_output),
                (1, magnitude.T @ np.abs(query), weights.T @ np.abs(grad_output))):
            self.grad_key[total][columns] += of_key
            self.grad_value[total][columns] += of_value

    def end_kv_head(self, b, kv_head, widened):
        self._compare("key", (b, slice(None), kv_head), *self.grad_key, widened)
        self._compare("value", (b, slice(None), kv_head), *self.grad_value, widened)

    def shares(self, output_bound):
        """The error of each gradient, as a share of what it may be."""
        for name in self.found:
            allowed = 2 * output_bound * np.sqrt(self.magnitudes[name])
            error = np.sqrt(self.errors[name])
            yield name, 0.0 if error == 0 else float(error / allowed) if allowed > 0 else np.inf
