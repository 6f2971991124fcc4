// What a kernel body needs of its surroundings, whether nvcc compiles it for a GPU or g++ for the
// host shim of the tests: number types, conversions, aligned packs, sums over a block.
#pragma once
#ifdef MDS_HOST_SHIM
#include "host_shim.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

namespace mds {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLowest = -3.0e38f;

template <typename T>
__device__ inline float to_float(T value) {
  return static_cast<float>(value);
}
template <typename T>
__device__ inline T from_float(float value) {
  return static_cast<T>(value);
}
#ifndef MDS_HOST_SHIM
template <>
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <>
__device__ inline __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline float to_float(__half value) {
  return __half2float(value);
}
template <>
__device__ inline __half from_float(float value) {
  return __float2half_rn(value);
}
#endif

// kPack neighbouring values that travel in one load; the address must be a multiple of its size.
template <typename T, int kPack>
struct alignas(sizeof(T) * kPack) Pack {
  T values[kPack];
};
template <int kPack, typename T>
__device__ inline Pack<T, kPack> load(const T* address) {
  return *reinterpret_cast<const Pack<T, kPack>*>(address);
}
template <int kPack, typename T>
__device__ inline void store(T* address, const Pack<T, kPack>& pack) {
  *reinterpret_cast<Pack<T, kPack>*>(address) = pack;
}

struct Sum {
  __device__ static float join(float a, float b) { return a + b; }
  static constexpr float kNothing = 0.f;
};
struct Largest {
  __device__ static float join(float a, float b) { return a > b ? a : b; }
  static constexpr float kNothing = kLowest;
};

template <typename Join>
__device__ inline float over_warp(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance >>= 1)
    value = Join::join(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

// The same result in every thread of the block. ``shared`` holds kThreads / 32 values.
template <typename Join, int kThreads>
__device__ inline float over_block(float value, float* shared) {
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  value = over_warp<Join>(value);
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = lane < kWarps ? shared[lane] : Join::kNothing;
  value = over_warp<Join>(value);
  __syncthreads();  // nobody writes the next sum before everybody has read this one
  return value;
}

}  // namespace mds
