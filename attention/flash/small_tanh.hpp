#pragma once

namespace annulus::flash {

/// tanh(scale · x) for |scale · x| ≤ kLimit, absolute error below 1.1e-5, without an exponential: x
/// times the polynomial in x² that interpolates at Chebyshev's nodes.
struct SmallTanh {
  static constexpr float kLimit = 0.5F;

  /// `factor` times its coefficients of 1, x² and x⁴.
  static void set_coefficients(float scale, float factor, float (&coefficients)[3]) {
    const float square = scale * scale;
    coefficients[0] = factor * 0.9999772310256958F * scale;
    coefficients[1] = factor * -0.331685334444046F * scale * square;
    coefficients[2] = factor * 0.1151852011680603F * scale * square * square;
  }
};

}  // namespace annulus::flash
