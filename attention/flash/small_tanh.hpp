#pragma once

#include <algorithm>
#include <cmath>

namespace annulus::flash {

/// tanh(scale · x), and that times the cap and log2 e, without an exponential where |x| is small
/// enough: an odd polynomial of x whose error is at most kError times 1/cap. The larger the cap,
/// the smaller the part of it in which the polynomial holds, and the larger the logits there.
class SmallTanh {
 public:
  /// The error of cap · tanh.
  static constexpr double kError = 6e-4;

  /// `scale`: of q·k, divided by the cap.
  SmallTanh(float scale, float cap) {
    const double end = std::min(0.5, std::pow(kError / (kRemainder * double{cap}), 1.0 / 7));
    double coefficients[3];
    interpolate(end, coefficients);
    double power = scale;
    bool normal = true;
    for (int i = 0; i < 3; ++i, power *= double{scale} * double{scale}) {
      plain[i] = static_cast<float>(coefficients[i] * power);
      scaled[i] = static_cast<float>(coefficients[i] * power * double{cap} * kLog2E);
      normal = normal && std::isnormal(plain[i]) && std::isnormal(scaled[i]);
    }
    // Values must rise with scores, and a score of −∞ must stay one.
    if (scale > 0 && normal) limit = static_cast<float>(end / double{scale});
  }

  float limit = -1;      ///< |x| must not be larger; −1: there is no such polynomial
  float plain[3] = {};   ///< coefficients of x, x³ and x⁵
  float scaled[3] = {};  ///< those times the cap and log2 e

  /// A cap that float32 can compute with; in that precision it gives the same logits.
  [[nodiscard]] static float computable(double cap) {
    return static_cast<float>(std::clamp(cap, 1e-30, 1e30));
  }
  /// True if tanh with an absolute error of 3e-7 is not enough.
  [[nodiscard]] static bool needs_accuracy(float cap) { return cap > 1000; }

 private:
  static constexpr double kLog2E = 1.4426950408889634;
  /// The error on [0, end] is at most so many times end⁷: tanh's coefficient of x⁷, 17/315, times
  /// the largest value of Chebyshev's polynomial on an interval of length end².
  static constexpr double kRemainder = 17.0 / 315 / 32;

  /// The polynomial in u = x² that equals tanh(x)/x at Chebyshev's nodes in [0, end²].
  static void interpolate(double end, double (&coefficients)[3]) {
    const double half = end * end / 2;
    const double apart = std::sqrt(0.75) * half;
    const double u[3] = {half - apart, half, half + apart};
    double f[3];
    for (int i = 0; i < 3; ++i) f[i] = std::tanh(std::sqrt(u[i])) / std::sqrt(u[i]);
    const double slope = (f[1] - f[0]) / apart;
    const double bend = (f[2] - 2 * f[1] + f[0]) / (2 * apart * apart);
    coefficients[0] = f[0] - slope * u[0] + bend * u[0] * u[1];
    coefficients[1] = slope - bend * (u[0] + u[1]);
    coefficients[2] = bend;
  }
};

}  // namespace annulus::flash
