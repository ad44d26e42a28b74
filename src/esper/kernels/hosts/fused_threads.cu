// What the fused kernel's other files stand on: threads and their tasks, and fours of examples.
//
// The same text is CUDA, in which the threads of a block take tasks in turn, and plain C++, in
// which one thread takes them all: tests run it without a GPU.
//
// Parity test: tests/tolaria/test_fused.py.

#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
// with registers of its own
#define ROUTINE static __device__ __noinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define CONSTANT const __grid_constant__
#define THREAD int(threadIdx.x)
#define STRIDE THREADS
#define FOR_WARPS(i, count) for (int i = threadIdx.x / 32; i < (count); i += WARPS)
// tasks by four examples: a thread keeps its four examples, and teams of threads take tasks
#define FOR_QUADS(task, b, count, n)                                            \
  for (int b = quad(n) * 4, task = team(n); task < (count); task += num_teams(n))
#define LANE int(threadIdx.x % 32)
#define LANES 32
#define SYNC __syncthreads()
#define BLOCK int(blockIdx.x)
#define NUM_BLOCKS int(gridDim.x)
extern __shared__ __align__(16) unsigned char shared_memory[];
#else
#include <cmath>
using std::exp;
using std::log;
using std::pow;
using std::sqrt;
using std::tanh;
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define ROUTINE static
#define KERNEL extern "C" void
#define CONSTANT const
#define THREAD 0
#define STRIDE 1
#define FOR_WARPS(i, count) for (int i = 0; i < (count); ++i)
#define FOR_QUADS(task, b, count, n) \
  for (int task = 0; task < (count); ++task) \
    for (int b = 0; b < (n); b += 4)
#define LANE 0
#define LANES 1
#define SYNC
#define BLOCK 0
#define NUM_BLOCKS 1
alignas(16) static unsigned char shared_memory[SHARED_BYTES];
#endif

#define FOR_ALL(i, count) for (int i = THREAD; i < (count); i += STRIDE)

typedef REAL real;

const int WARPS = THREADS / 32;

// Routines are handed pointers without knowing what they point to; loads are faster if they do.
#ifdef __CUDACC__
DEVICE real* global(const real* p) {
  return static_cast<real*>(__cvta_global_to_generic(__cvta_generic_to_global(p)));
}

DEVICE real* shared(const real* p) {
  return static_cast<real*>(__cvta_shared_to_generic(__cvta_generic_to_shared(p)));
}
#else
DEVICE real* global(const real* p) { return const_cast<real*>(p); }

DEVICE real* shared(const real* p) { return const_cast<real*>(p); }
#endif

DEVICE const real* transposed(const real* p) { return WEIGHTS_IN_SHARED ? shared(p) : global(p); }

struct alignas(16) Four {
  real v[4];
};

// One layer as the table has it; see `layer_table.Row`.
struct Row {
  int kind, channels, height, width, out_channels, out_height, out_width;
  int kernel_height, kernel_width, stride, pad_height, pad_width;
  int channel_step, out_channel_step, position_step;
  int params, transposed, out, saved;
  int rectifies;  // a ReLU follows
};

DEVICE int num_teams(int n) { return THREADS / (n / 4); }

#ifdef __CUDACC__
DEVICE int quad(int n) { return threadIdx.x % (n / 4); }

// Threads that are left over when the teams are made have no team.
DEVICE int team(int n) {
  const int number = threadIdx.x / (n / 4);
  return number < num_teams(n) ? number : 1 << 30;
}
#endif

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }

DEVICE Four load(const real* at) { return *reinterpret_cast<const Four*>(at); }
DEVICE void store(real* at, const Four& x) { *reinterpret_cast<Four*>(at) = x; }

DEVICE Four all_four(real value) { return Four{{value, value, value, value}}; }

DEVICE void add_scaled(Four& y, real w, const Four& x) {
#pragma unroll
  for (int e = 0; e < 4; ++e) y.v[e] += w * x.v[e];
}

DEVICE real dot(const Four& a, const Four& b, real sum) {
#pragma unroll
  for (int e = 0; e < 4; ++e) sum += a.v[e] * b.v[e];
  return sum;
}

// The sum over a warp's lanes, in every lane.
DEVICE real lane_sum(real x) {
#ifdef __CUDACC__
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
#endif
  return x;
}

// The sum of `count` reals, in every lane.
DEVICE real warp_total(const real* x, int count) {
  real sum = 0;
#pragma unroll 4
  for (int k = LANE * 4; k < count; k += LANES * 4) sum = dot(load(x + k), all_four(1), sum);
  return lane_sum(sum);
}

#ifdef __CUDACC__
// Halves of the lanes exchange halves of their sums, until a lane holds at most one.
template <int HELD, int STEP>
DEVICE void exchange(real* sums) {
  const bool upper = LANE & STEP;
#pragma unroll
  for (int i = 0; i < HELD / 2; ++i) {
    const real given = upper ? sums[i] : sums[i + HELD / 2];
    sums[i] = (upper ? sums[i + HELD / 2] : sums[i]) + __shfl_xor_sync(0xffffffffu, given, STEP);
  }
  if (HELD == 1) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], STEP);
  if constexpr (STEP > 1) exchange<(HELD > 1 ? HELD / 2 : 1), STEP / 2>(sums);
}
#endif

// Hands each of N sums over a warp's lanes, N a power of two up to 32, to one of the lanes.
template <int N, class Take>
DEVICE void lane_sums(real (&sums)[N], Take take) {
#ifdef __CUDACC__
  exchange<N, LANES / 2>(sums);
  if (LANE % (LANES / N) == 0) take(LANE / (LANES / N), sums[0]);
#else
  for (int i = 0; i < N; ++i) take(i, sums[i]);
#endif
}

DEVICE Four rectified(Four x) {
#pragma unroll
  for (int e = 0; e < 4; ++e) x.v[e] = x.v[e] <= 0 ? 0 : x.v[e];  // a nan stays
  return x;
}

// The gradient of a rectifier's input, from that of its output.
DEVICE Four passed(Four grad, const Four& out) {
#pragma unroll
  for (int e = 0; e < 4; ++e) grad.v[e] = out.v[e] <= 0 ? 0 : grad.v[e];
  return grad;
}

DEVICE int num_taps(const Row& r) { return r.kernel_height * r.kernel_width; }

DEVICE int num_inputs(const Row& r) { return r.channels * r.height * r.width; }

DEVICE int num_outputs(const Row& r) { return r.out_channels * r.out_height * r.out_width; }

DEVICE int padded_channels(int channels) { return ceil_div(channels, 4) * 4; }

DEVICE int in_row(const Row& r, int c, int i, int j) {
  return c * r.channel_step + (i * r.width + j) * r.position_step;
}

DEVICE int out_row(const Row& r, int o, int i, int j) {
  return o * r.out_channel_step + (i * r.out_width + j) * r.position_step;
}

