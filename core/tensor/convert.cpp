#include <cstring>
#include <string>

#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>

// Highway compiles the part below once per instruction set and picks one at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/convert.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace annulus::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Without such CPU instructions, Highway neither rounds nor handles infinities.
constexpr bool kConvertsFloat16 = (HWY_TARGET & (HWY_SSE4 | HWY_SSSE3 |
#ifdef HWY_SSE2  // of later versions of Highway
                                                 HWY_SSE2 |
#endif
                                                 HWY_EMU128 | HWY_SCALAR)) == 0;

void widen_float16(const Float16* source, float* destination, std::int64_t count) {
  const hn::ScalableTag<float> f32;
  const hn::Rebind<hwy::float16_t, decltype(f32)> f16;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  std::int64_t i = 0;
  for (; kConvertsFloat16 && i + lanes <= count; i += lanes) {
    const auto half = hn::LoadU(f16, reinterpret_cast<const hwy::float16_t*>(source + i));
    hn::StoreU(hn::PromoteTo(f32, half), f32, destination + i);
  }
  for (; i < count; ++i) destination[i] = static_cast<float>(source[i]);
}

void round_to_float16(const float* source, Float16* destination, std::int64_t count) {
  const hn::ScalableTag<float> f32;
  const hn::Rebind<hwy::float16_t, decltype(f32)> f16;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  std::int64_t i = 0;
  for (; kConvertsFloat16 && i + lanes <= count; i += lanes) {
    const auto half = hn::DemoteTo(f16, hn::LoadU(f32, source + i));
    hn::StoreU(half, f16, reinterpret_cast<hwy::float16_t*>(destination + i));
  }
  for (; i < count; ++i) destination[i] = Float16(source[i]);
}

}  // namespace annulus::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

HWY_EXPORT(widen_float16);
HWY_EXPORT(round_to_float16);

void to_float32(const void* source, DType dtype, float* destination, std::int64_t count) {
  if (count == 0) return;  // the pointers may be null
  switch (dtype) {
    case DType::float32:
      std::memcpy(destination, source, static_cast<std::size_t>(count) * sizeof(float));
      return;
    case DType::float16:
      HWY_DYNAMIC_DISPATCH(widen_float16)
      (static_cast<const Float16*>(source), destination, count);
      return;
    case DType::bfloat16: {
      const auto* values = static_cast<const BFloat16*>(source);
      for (std::int64_t i = 0; i < count; ++i) destination[i] = static_cast<float>(values[i]);
      return;
    }
    default:
      throw InternalError("to_float32: unsupported dtype " + std::string(name_of(dtype)));
  }
}

void from_float32(const float* source, DType dtype, void* destination, std::int64_t count) {
  if (count == 0) return;  // the pointers may be null
  switch (dtype) {
    case DType::float32:
      std::memcpy(destination, source, static_cast<std::size_t>(count) * sizeof(float));
      return;
    case DType::float16:
      HWY_DYNAMIC_DISPATCH(round_to_float16)
      (source, static_cast<Float16*>(destination), count);
      return;
    case DType::bfloat16: {
      auto* values = static_cast<BFloat16*>(destination);
      for (std::int64_t i = 0; i < count; ++i) values[i] = BFloat16(source[i]);
      return;
    }
    default:
      throw InternalError("from_float32: unsupported dtype " + std::string(name_of(dtype)));
  }
}

}  // namespace annulus
#endif
