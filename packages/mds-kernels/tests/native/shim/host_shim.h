// CUDA's view of the world on a CPU, enough for the kernel bodies of this package: every thread of
// a block is a fiber with a stack of its own, and the fibers take turns on one real thread.
//
// The order is the worst that CUDA allows: one warp runs as far as it can, to a barrier of the
// block or to its end, before the next one starts; a seed other than 0 shuffles the warps at every
// barrier. Code that forgets a __syncthreads() reads what has not been written, and a barrier that
// only some threads reach is an error. Not covered: tensor cores, asynchronous copies, races
// between blocks (they run one after another), orders of memory.
#pragma once
#include <math.h>
#include <sys/mman.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static
using __nv_bfloat16 = c10::BFloat16;
using __half = c10::Half;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

extern "C" void mds_shim_switch(void** save, void* load);
#ifdef MDS_SHIM_MAIN
#if defined(__x86_64__)
asm(R"(
.text
.globl mds_shim_switch
.type mds_shim_switch,@function
mds_shim_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#else
#error "the host shim can switch stacks on x86-64 only"
#endif
#endif

namespace mds_shim {

constexpr size_t kStackBytes = 64 * 1024;
constexpr int kLanes = 32;

enum State : uint8_t { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber {
  void* stack_pointer;
  dim3 index;
  State state;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<char*> stacks;
  std::vector<uint64_t> exchanged;
  void* scheduler = nullptr;
  int current = -1;
  std::function<void()>* body = nullptr;
  dim3 index, size, grid;
};

inline Block block;

inline void wait_at(State barrier) {
  Fiber& me = block.fibers[block.current];
  me.state = barrier;
  mds_shim_switch(&me.stack_pointer, block.scheduler);
}

inline void entry() {
  (*block.body)();
  block.fibers[block.current].state = kDone;
  void* nowhere;
  mds_shim_switch(&nowhere, block.scheduler);
}

inline void prepare_fibers(int count) {
  while (static_cast<int>(block.stacks.size()) < count) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) throw std::runtime_error("no memory for a fiber's stack");
    block.stacks.push_back(static_cast<char*>(stack));
  }
  block.fibers.resize(count);
  block.exchanged.assign(count, 0);
  for (int i = 0; i < count; ++i) {
    const unsigned x = block.size.x, y = block.size.y;
    void** top = reinterpret_cast<void**>(block.stacks[i] + kStackBytes);
    *--top = nullptr;  // where a return address would stand, so that the stack is aligned
    *--top = reinterpret_cast<void*>(&entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    block.fibers[i] = {top, dim3(i % x, i / x % y, i / (x * y)), kReady};
  }
}

inline int count(State state) {
  return std::count_if(block.fibers.begin(), block.fibers.end(),
                       [&](const Fiber& fiber) { return fiber.state == state; });
}

// Run one warp until all its threads are done or wait for the rest of the block.
inline void run_warp(int first, int last) {
  for (;;) {
    for (int i = first; i < last; ++i)
      if (block.fibers[i].state == kReady) {
        block.current = i;
        mds_shim_switch(&block.scheduler, block.fibers[i].stack_pointer);
      }
    int waiting = 0, done = 0;
    for (int i = first; i < last; ++i) {
      waiting += block.fibers[i].state == kAtWarpBarrier;
      done += block.fibers[i].state == kDone;
    }
    if (waiting == 0 || waiting + done != last - first) return;
    for (int i = first; i < last; ++i)
      if (block.fibers[i].state == kAtWarpBarrier) block.fibers[i].state = kReady;
  }
}

inline void run_block(uint64_t seed) {
  const int threads = block.size.x * block.size.y * block.size.z;
  prepare_fibers(threads);
  std::vector<int> order((threads + kLanes - 1) / kLanes);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::mt19937_64 random(seed);
  for (;;) {
    if (seed) std::shuffle(order.begin(), order.end(), random);
    for (int warp : order) run_warp(warp * kLanes, std::min(threads, (warp + 1) * kLanes));
    if (count(kDone) == threads) return;
    if (count(kAtBlockBarrier) != threads)
      throw std::runtime_error("divergent barrier: " + std::to_string(count(kAtBlockBarrier)) +
                               " of " + std::to_string(threads) + " threads reached it");
    for (Fiber& fiber : block.fibers) fiber.state = kReady;
  }
}

inline void launch(dim3 grid, dim3 size, uint64_t seed, std::function<void()> body) {
  block.body = &body;
  block.size = size;
  block.grid = grid;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        block.index = dim3(x, y, z);
        run_block(seed ? seed + x * 7919ull + y * 104729ull : 0);
      }
}

// Block ``index`` of a grid, alone.
inline void launch_one(unsigned index, dim3 size, uint64_t seed, std::function<void()> body) {
  block.body = &body;
  block.size = size;
  block.grid = dim3(index + 1);
  block.index = dim3(index);
  run_block(seed);
}

// The value that lane ``source`` of this warp gave.
template <typename T>
T exchange(T value, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  const int me = block.current, from = (me & ~(kLanes - 1)) + source;
  std::memcpy(&block.exchanged[me], &value, sizeof(T));
  wait_at(kAtWarpBarrier);
  if (source >= 0 && source < kLanes && from < static_cast<int>(block.fibers.size()))
    std::memcpy(&value, &block.exchanged[from], sizeof(T));
  wait_at(kAtWarpBarrier);  // nobody gives the next value before everybody has read this one
  return value;
}

}  // namespace mds_shim

#define threadIdx (mds_shim::block.fibers[mds_shim::block.current].index)
#define blockIdx (mds_shim::block.index)
#define blockDim (mds_shim::block.size)
#define gridDim (mds_shim::block.grid)

inline void __syncthreads() { mds_shim::wait_at(mds_shim::kAtBlockBarrier); }
inline void __syncwarp(unsigned = 0xffffffffu) { mds_shim::wait_at(mds_shim::kAtWarpBarrier); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return mds_shim::exchange(value, (mds_shim::block.current & (mds_shim::kLanes - 1)) ^ mask);
}
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
