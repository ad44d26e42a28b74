// Forward and backward of every layer kind for one network, by all threads of a block.
//
// All activations of a block lie in one workspace as rows of n examples, n a multiple of 4; a
// tensor is where its first row begins. Work is cut into tasks of a few rows by four examples,
// which threads take in turn; channels beyond the last are read, and what comes of them is not
// written: there is room for that everywhere. A layer ends with all its results written but not yet seen: SYNC
// stands between layers. Sums that many threads share are made by warps in a fixed order, so
// that runs are the same to the bit.
//
// The same text is plain C++, in which one thread takes all tasks: tests run it without a GPU.

#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define CONSTANT const __grid_constant__
#define FOR_ALL(i, count) for (int i = threadIdx.x; i < (count); i += blockDim.x)
#define FOR_WARPS(i, count) for (int i = threadIdx.x / 32; i < (count); i += blockDim.x / 32)
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
#define KERNEL extern "C" void
#define CONSTANT const
#define FOR_ALL(i, count) for (int i = 0; i < (count); ++i)
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

typedef REAL real;

const int WARPS = THREADS / 32;

struct alignas(16) Four {
  real v[4];
};

// One layer as the table has it; see `fused_plan.Row`.
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

// How many channels a task takes: eight, or four where eight would leave most of a block idle.
DEVICE int channel_block(int channels) {
  const int left = channels % 8;
  return left == 0 || left > 4 ? 8 : 4;
}

DEVICE int padded_channels(int channels) {
  const int block = channel_block(channels);
  return ceil_div(channels, block) * block;
}

DEVICE int in_row(const Row& r, int c, int i, int j) {
  return c * r.channel_step + (i * r.width + j) * r.position_step;
}

DEVICE int out_row(const Row& r, int o, int i, int j) {
  return o * r.out_channel_step + (i * r.out_width + j) * r.position_step;
}

// Whether tasks of eight channels are enough to keep all threads busy.
DEVICE bool takes_eight(int channels, int area, int n) {
  return channel_block(channels) == 8 && ceil_div(channels, 8) * area >= num_teams(n);
}

// Adds B output channels' shares of U input channels, whose values are loaded side by side.
template <int B, int U>
DEVICE void add_channels(Four (&sum)[B], const real* x, int x_step, const real* wt, int wt_step) {
  Four value[U];
#pragma unroll
  for (int u = 0; u < U; ++u) value[u] = load(x + u * x_step);
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int q = 0; q < B; q += 4) {
      const Four weights = load(wt + u * wt_step + q);
#pragma unroll
      for (int e = 0; e < 4; ++e) add_scaled(sum[q + e], weights.v[e], value[u]);
    }
}

template <int B>
DEVICE void conv_forward(const Row& r, const real* w, const real* wt, const real* x, real* y, int n) {
  const int across = padded_channels(r.out_channels), taps = num_taps(r);
  const int x_step = r.channel_step * n, wt_step = taps * across;
  const real* bias = w + r.out_channels * r.channels * taps;
  FOR_QUADS(task, b, across / B * r.out_height * r.out_width, n) {
    const int j = task % r.out_width, i = task / r.out_width % r.out_height;
    const int o = task / r.out_width / r.out_height * B;
    const int top = i * r.stride - r.pad_height, left = j * r.stride - r.pad_width;
    Four sum[B];
#pragma unroll
    for (int q = 0; q < B; ++q) sum[q] = all_four(o + q < r.out_channels ? bias[o + q] : real(0));
    for (int ti = most(0, -top); ti < least(r.kernel_height, r.height - top); ++ti)
      for (int tj = most(0, -left); tj < least(r.kernel_width, r.width - left); ++tj) {
        const real* seen = x + in_row(r, 0, top + ti, left + tj) * n + b;
        const real* weights = wt + (ti * r.kernel_width + tj) * across + o;
        int c = 0;
        for (; c + 4 <= r.channels; c += 4, seen += 4 * x_step, weights += 4 * wt_step)
          add_channels<B, 4>(sum, seen, x_step, weights, wt_step);
        for (; c < r.channels; ++c, seen += x_step, weights += wt_step)
          add_channels<B, 1>(sum, seen, x_step, weights, wt_step);
      }
    real* out = y + out_row(r, o, i, j) * n + b;
#pragma unroll
    for (int q = 0; q < B; ++q)
      if (o + q < r.out_channels)
        store(out + q * r.out_channel_step * n, r.rectifies ? rectified(sum[q]) : sum[q]);
  }
}

// Every input collects from the windows it was seen in. If `adds`, the result is added to what is
// there. If the inputs come from a rectifier, `mask` are those inputs, and the gradient is that of
// what went into it.
template <int B>
DEVICE void conv_input_grad(const Row& r, const real* wt, const real* gy, real* gx, bool adds,
                            const real* mask, int n) {
  const int across = padded_channels(r.out_channels), taps = num_taps(r);
  const int out_step = r.out_channel_step * n;
  FOR_QUADS(task, b, ceil_div(r.channels, B) * r.height * r.width, n) {
    const int j = task % r.width, i = task / r.width % r.height;
    const int c = task / r.width / r.height * B;
    const int at = in_row(r, c, i, j) * n + b, channel_step = r.channel_step * n;
    Four sum[B];
#pragma unroll
    for (int q = 0; q < B; ++q)
      sum[q] = adds && c + q < r.channels ? load(gx + at + q * channel_step) : all_four(0);
    for (int ti = (i + r.pad_height) % r.stride; ti < r.kernel_height; ti += r.stride) {
      const int out_i = (i + r.pad_height - ti) / r.stride;
      if (i + r.pad_height < ti || out_i >= r.out_height) continue;
      for (int tj = (j + r.pad_width) % r.stride; tj < r.kernel_width; tj += r.stride) {
        const int out_j = (j + r.pad_width - tj) / r.stride;
        if (j + r.pad_width < tj || out_j >= r.out_width) continue;
        const real* from = gy + out_row(r, 0, out_i, out_j) * n + b;
        const real* to = wt + (c * taps + ti * r.kernel_width + tj) * across;
        for (int o = 0; o < r.out_channels; o += 4, from += 4 * out_step) {
          Four grad[4];
#pragma unroll
          for (int e = 0; e < 4; ++e)  // beyond the last channel weights are 0
            grad[e] = load(from + least(e, r.out_channels - 1 - o) * out_step);
#pragma unroll
          for (int q = 0; q < B; ++q) {
            const Four weights = load(to + q * taps * across + o);
#pragma unroll
            for (int e = 0; e < 4; ++e) add_scaled(sum[q], weights.v[e], grad[e]);
          }
        }
      }
    }
#pragma unroll
    for (int q = 0; q < B; ++q)
      if (c + q < r.channels) {
        if (mask) sum[q] = passed(sum[q], load(mask + at + q * channel_step));
        store(gx + at + q * channel_step, sum[q]);
      }
  }
}

// A walk of a warp's lanes over the examples, four at a time, of every output position; `split`
// of `splits` warps take turns.
struct Walk {
  int b, i, j;

  DEVICE_MEMBER Walk(const Row& r, int split, int n) {
    const int quads = n / 4, first = split * LANES + LANE;
    b = first % quads * 4;
    i = first / quads / r.out_width;
    j = first / quads % r.out_width;
  }

  DEVICE_MEMBER void advance(const Row& r, int skipped, int positions, int n) {
    b += skipped;
    j += positions;
    if (b >= n) {
      b -= n;
      ++j;
    }
    while (j >= r.out_width) {
      j -= r.out_width;
      ++i;
    }
  }
};

// Adds to `parts`: NUM_PARTS rows of gradients, `columns` apart, whose sum counts. A warp makes
// four output by B input channels at one tap, from its share of the positions and examples.
template <int B>
DEVICE void conv_weight_grad(const Row& r, const real* x, const real* gy, real* parts, int columns,
                             int n) {
  const int taps = num_taps(r), blocks_in = ceil_div(r.channels, B);
  const int tiles = ceil_div(r.out_channels, 4) * blocks_in * taps;
  const int splits = most(1, least(NUM_PARTS, 3 * WARPS / tiles));
  const int skipped = splits * LANES % (n / 4) * 4, positions = splits * LANES / (n / 4);
  FOR_WARPS(task, tiles * splits) {
    const int split = task % splits, tap = task / splits % taps;
    const int c = task / splits / taps % blocks_in * B, o = task / splits / taps / blocks_in * 4;
    const int down = tap / r.kernel_width - r.pad_height, right = tap % r.kernel_width - r.pad_width;
    real sum[4 * B];
#pragma unroll
    for (int q = 0; q < 4 * B; ++q) sum[q] = 0;
    for (Walk at(r, split, n); at.i < r.out_height; at.advance(r, skipped, positions, n)) {
      const int i = at.i * r.stride + down, j = at.j * r.stride + right;
      if (i < 0 || j < 0 || i >= r.height || j >= r.width) continue;
      const real* from = gy + out_row(r, o, at.i, at.j) * n + at.b;
      const real* seen = x + in_row(r, c, i, j) * n + at.b;
      Four grad[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        grad[e] = load(from + e * r.out_channel_step * n);
#pragma unroll
      for (int q = 0; q < B; ++q) {
        const Four value = load(seen + q * r.channel_step * n);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e * B + q] = dot(grad[e], value, sum[e * B + q]);
      }
    }
    lane_sums(sum, [&](int which, real total) {
      const int e = which / B, q = which % B;
      if (o + e < r.out_channels && c + q < r.channels)
        parts[split * columns + ((o + e) * r.channels + c + q) * taps + tap] += total;
    });
  }
}

DEVICE void conv_bias_grad(const Row& r, const real* gy, real* part, int n) {
  real* bias = part + r.out_channels * r.channels * num_taps(r);
  FOR_WARPS(o, r.out_channels) {
    real sum = 0;
    for (int at = 0; at < r.out_height * r.out_width; ++at)
      for (int b = LANE * 4; b < n; b += LANES * 4)
        sum = dot(load(gy + out_row(r, o, 0, at) * n + b), all_four(1), sum);
    sum = lane_sum(sum);
    if (LANE == 0) bias[o] += sum;
  }
}

DEVICE void depthwise_forward(const Row& r, const real* w, const real* x, real* y, int n) {
  const int taps = num_taps(r), area = r.height * r.width;
  FOR_QUADS(row, b, r.channels * area, n) {
    const int c = row / area, i = row % area / r.width, j = row % r.width;
    const int top = i - r.pad_height, left = j - r.pad_width;
    Four sum = all_four(w[r.channels * taps + c]);
    for (int ti = most(0, -top); ti < least(r.kernel_height, r.height - top); ++ti)
      for (int tj = most(0, -left); tj < least(r.kernel_width, r.width - left); ++tj)
        add_scaled(sum, w[c * taps + ti * r.kernel_width + tj],
                   load(x + in_row(r, c, top + ti, left + tj) * n + b));
    store(y + row * n + b, r.rectifies ? rectified(sum) : sum);
  }
}

DEVICE void depthwise_backward(const Row& r, const real* w, real* part, const real* x,
                               const real* gy, real* gx, int n) {
  const int taps = num_taps(r), area = r.height * r.width;
  FOR_QUADS(row, b, r.channels * area, n) {
    const int c = row / area, i = row % area / r.width, j = row % r.width;
    const int top = i + r.pad_height, left = j + r.pad_width;
    Four sum = all_four(0);
    for (int ti = most(0, top - r.height + 1); ti <= least(r.kernel_height - 1, top); ++ti)
      for (int tj = most(0, left - r.width + 1); tj <= least(r.kernel_width - 1, left); ++tj)
        add_scaled(sum, w[c * taps + ti * r.kernel_width + tj],
                   load(gy + in_row(r, c, top - ti, left - tj) * n + b));
    store(gx + row * n + b, sum);
  }
  const int skipped = LANES % (n / 4) * 4, positions = LANES / (n / 4);
  FOR_WARPS(task, r.channels * (taps + 1)) {
    const int c = task % r.channels, tap = task / r.channels;
    const bool is_bias = tap == taps;
    const int down = is_bias ? 0 : tap / r.kernel_width - r.pad_height;
    const int right = is_bias ? 0 : tap % r.kernel_width - r.pad_width;
    real sum = 0;
    for (Walk at(r, 0, n); at.i < r.height; at.advance(r, skipped, positions, n)) {
      const int i = at.i + down, j = at.j + right;
      if (i < 0 || j < 0 || i >= r.height || j >= r.width) continue;
      const Four seen = is_bias ? all_four(1) : load(x + in_row(r, c, i, j) * n + at.b);
      sum = dot(load(gy + in_row(r, c, at.i, at.j) * n + at.b), seen, sum);
    }
    sum = lane_sum(sum);
    if (LANE == 0) part[is_bias ? r.channels * taps + c : c * taps + tap] += sum;
  }
}

// Slices of an example's values that are summed side by side.
DEVICE int num_slices(int count, int n) { return least(count, num_teams(n)); }

// `saved`: the normalised values, then a row with the inverse deviations.
DEVICE void norm_forward(const Row& r, const real* w, const real* x, real* y, real* saved,
                         real* scratch, int n) {
  const int area = r.height * r.width, count = r.channels * area, slices = num_slices(count, n);
  FOR_QUADS(slice, b, slices, n) {
    Four mean = all_four(0), spread = all_four(0);
    for (int row = slice; row < count; row += slices) add_scaled(mean, 1, load(x + row * n + b));
    const real share = real(1) / ((count - slice + slices - 1) / slices);
    for (int e = 0; e < 4; ++e) mean.v[e] *= share;
    for (int row = slice; row < count; row += slices) {
      const Four value = load(x + row * n + b);
      for (int e = 0; e < 4; ++e)
        spread.v[e] += (value.v[e] - mean.v[e]) * (value.v[e] - mean.v[e]);
    }
    store(scratch + 2 * slice * n + b, mean);
    store(scratch + (2 * slice + 1) * n + b, spread);
  }
  SYNC;
  FOR_QUADS(slice, b, slices, n) {
    Four mean = all_four(0), inverse = all_four(0);
    for (int s = 0; s < slices; ++s)
      add_scaled(mean, real((count - s + slices - 1) / slices) / count, load(scratch + 2 * s * n + b));
    for (int s = 0; s < slices; ++s) {
      const Four part = load(scratch + 2 * s * n + b), spread = load(scratch + (2 * s + 1) * n + b);
      const real seen = (count - s + slices - 1) / slices;
      for (int e = 0; e < 4; ++e) {
        const real off = part.v[e] - mean.v[e];
        inverse.v[e] += spread.v[e] + seen * off * off;
      }
    }
    for (int e = 0; e < 4; ++e) inverse.v[e] = 1 / sqrt(inverse.v[e] / count + real(NORM_EPSILON));
    if (slice == 0) store(saved + count * n + b, inverse);
    for (int row = slice; row < count; row += slices) {
      Four value = load(x + row * n + b);
      const real weight = w[row / area], bias = w[r.channels + row / area];
      for (int e = 0; e < 4; ++e) value.v[e] = (value.v[e] - mean.v[e]) * inverse.v[e];
      store(saved + row * n + b, value);
      for (int e = 0; e < 4; ++e) value.v[e] = value.v[e] * weight + bias;
      store(y + row * n + b, r.rectifies ? rectified(value) : value);
    }
  }
}

// In place: the gradient of the outputs becomes that of the inputs.
DEVICE void norm_backward(const Row& r, const real* w, real* part, const real* saved, real* grad,
                          real* scratch, int n) {
  const int area = r.height * r.width, count = r.channels * area, slices = num_slices(count, n);
  FOR_QUADS(slice, b, slices, n) {
    Four mean = all_four(0), product = all_four(0);
    for (int row = slice; row < count; row += slices) {
      const Four g = load(grad + row * n + b), value = load(saved + row * n + b);
      const real weight = w[row / area];
      for (int e = 0; e < 4; ++e) {
        mean.v[e] += weight * g.v[e];
        product.v[e] += weight * g.v[e] * value.v[e];
      }
    }
    store(scratch + 2 * slice * n + b, mean);
    store(scratch + (2 * slice + 1) * n + b, product);
  }
  FOR_WARPS(c, r.channels) {
    real weight = 0, bias = 0;
    for (int k = LANE * 4; k < area * n; k += LANES * 4) {
      const Four g = load(grad + c * area * n + k);
      weight = dot(g, load(saved + c * area * n + k), weight);
      bias = dot(g, all_four(1), bias);
    }
    weight = lane_sum(weight);
    bias = lane_sum(bias);
    if (LANE == 0) {
      part[c] += weight;
      part[r.channels + c] += bias;
    }
  }
  SYNC;
  FOR_QUADS(slice, b, slices, n) {
    Four mean = all_four(0), product = all_four(0);
    for (int s = 0; s < slices; ++s) {
      add_scaled(mean, real(1) / count, load(scratch + 2 * s * n + b));
      add_scaled(product, real(1) / count, load(scratch + (2 * s + 1) * n + b));
    }
    const Four inverse = load(saved + count * n + b);
    for (int row = slice; row < count; row += slices) {
      Four g = load(grad + row * n + b);
      const Four value = load(saved + row * n + b);
      const real weight = w[row / area];
      for (int e = 0; e < 4; ++e)
        g.v[e] = (weight * g.v[e] - mean.v[e] - value.v[e] * product.v[e]) * inverse.v[e];
      store(grad + row * n + b, g);
    }
  }
}

DEVICE void relu_forward(const real* x, real* y, int count) {
  FOR_ALL(task, count / 4) store(y + task * 4, rectified(load(x + task * 4)));
}

DEVICE void relu_backward(const real* y, real* grad, int count) {
  FOR_ALL(task, count / 4) store(grad + task * 4, passed(load(grad + task * 4), load(y + task * 4)));
}

// Every row of an example gets a number of its own.
DEVICE void code_forward(const Row& r, const real* w, const real* x, real* y, int n) {
  FOR_QUADS(row, b, num_inputs(r), n) {
    Four value = load(x + row * n + b);
    add_scaled(value, w[row], all_four(1));
    store(y + row * n + b, value);
  }
}

// The sum of `count` reals, in every lane.
DEVICE real warp_total(const real* x, int count) {
  real sum = 0;
  for (int k = LANE * 4; k < count; k += LANES * 4) sum = dot(load(x + k), all_four(1), sum);
  return lane_sum(sum);
}

DEVICE void code_backward(const Row& r, real* part, const real* gy, int n) {
  FOR_WARPS(row, num_inputs(r)) {
    const real total = warp_total(gy + row * n, n);
    if (LANE == 0) part[row] += total;
  }
}

// A matrix of rows: where element (i, j) lies is `i * down + j * right` rows from `at`.
template <class Real>
struct Matrix {
  Real* at;
  int down, right;
};

// out = a b^T for matrices of rows, example by example: out[i, j] = sum over k of a[i, k] b[j, k].
DEVICE void multiply(const Matrix<real>& out, const Matrix<const real>& a,
                     const Matrix<const real>& b, int height, int width, int depth, int n) {
  const int blocks = ceil_div(width, 4);
  FOR_QUADS(task, at, ceil_div(height, 4) * blocks, n) {
    const int i = task / blocks * 4, j = task % blocks * 4;
    Four sum[4][4];
#pragma unroll
    for (int e = 0; e < 16; ++e) sum[e / 4][e % 4] = all_four(0);
    for (int k = 0; k < depth; ++k) {
      Four left[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        left[e] = load(a.at + (least(i + e, height - 1) * a.down + k * a.right) * n + at);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const Four right = load(b.at + (least(j + q, width - 1) * b.down + k * b.right) * n + at);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
          for (int f = 0; f < 4; ++f) sum[e][q].v[f] += left[e].v[f] * right.v[f];
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int q = 0; q < 4; ++q)
        if (i + e < height && j + q < width)
          store(out.at + ((i + e) * out.down + (j + q) * out.right) * n + at, sum[e][q]);
  }
}

// Softmax over keys of scaled products of queries and keys, then the values so weighted. Input:
// queries, keys and values `[3 * width, length]`; `saved`: the weights `[length, length]`.
DEVICE void attend_forward(const Row& r, const real* x, real* y, real* saved, int n) {
  const int width = r.out_channels, length = r.width, size = width * length * n;
  const real scale = 1 / sqrt(real(width));
  multiply({saved, length, 1}, {x, 1, length}, {x + size, 1, length}, length, length, width, n);
  SYNC;
  FOR_QUADS(i, b, length, n) {
    real* scores = saved + i * length * n + b;
    Four top = load(scores), total = all_four(0);
    for (int m = 1; m < length; ++m) {
      const Four score = load(scores + m * n);
      for (int e = 0; e < 4; ++e) top.v[e] = score.v[e] > top.v[e] ? score.v[e] : top.v[e];
    }
    for (int m = 0; m < length; ++m) {
      Four score = load(scores + m * n);
      for (int e = 0; e < 4; ++e) {
        score.v[e] = exp((score.v[e] - top.v[e]) * scale);
        total.v[e] += score.v[e];
      }
      store(scores + m * n, score);
    }
    for (int e = 0; e < 4; ++e) total.v[e] = 1 / total.v[e];
    for (int m = 0; m < length; ++m) {
      Four score = load(scores + m * n);
      for (int e = 0; e < 4; ++e) score.v[e] *= total.v[e];
      store(scores + m * n, score);
    }
  }
  SYNC;
  multiply({y, length, 1}, {x + 2 * size, length, 1}, {saved, length, 1}, width, length, length, n);
}

// `scores` is room for the gradients of the scores `[length, length]`.
DEVICE void attend_backward(const Row& r, const real* x, const real* saved, const real* gy, real* gx,
                            real* scores, int n) {
  const int width = r.out_channels, length = r.width, size = width * length * n;
  const real scale = 1 / sqrt(real(width));
  multiply({scores, length, 1}, {gy, 1, length}, {x + 2 * size, 1, length}, length, length, width, n);
  SYNC;
  FOR_QUADS(i, b, length, n) {
    const real* share = saved + i * length * n + b;
    real* grads = scores + i * length * n + b;
    Four inner = all_four(0);
    for (int m = 0; m < length; ++m) {
      const Four weight = load(share + m * n), grad = load(grads + m * n);
      for (int e = 0; e < 4; ++e) inner.v[e] += weight.v[e] * grad.v[e];
    }
    for (int m = 0; m < length; ++m) {
      const Four weight = load(share + m * n);
      Four grad = load(grads + m * n);
      for (int e = 0; e < 4; ++e) grad.v[e] = weight.v[e] * (grad.v[e] - inner.v[e]) * scale;
      store(grads + m * n, grad);
    }
  }
  SYNC;
  multiply({gx, length, 1}, {x + size, length, 1}, {scores, length, 1}, width, length, length, n);
  multiply({gx + size, length, 1}, {x, length, 1}, {scores, 1, length}, width, length, length, n);
  multiply({gx + 2 * size, length, 1}, {gy, length, 1}, {saved, 1, length}, width, length, length, n);
}

// x + alpha * change; `aux` keeps tanh(seed) or the gate for the way back.
DEVICE void blend_forward(const real* x, const real* seed, real* y, real* aux, int count, real alpha,
                          int style) {
  FOR_ALL(task, count / 4) {
    const Four a = load(x + task * 4), s = load(seed + task * 4);
    Four out, kept;
    for (int e = 0; e < 4; ++e) {
      if (style == ADD) {
        out.v[e] = a.v[e] + alpha * s.v[e];
      } else if (style == MULTIPLY) {
        kept.v[e] = tanh(s.v[e]);
        out.v[e] = a.v[e] + alpha * a.v[e] * kept.v[e];
      } else {
        kept.v[e] = 1 / (1 + exp(-a.v[e]));
        out.v[e] = a.v[e] + alpha * kept.v[e] * s.v[e];
      }
    }
    if (style != ADD) store(aux + task * 4, kept);
    store(y + task * 4, out);
  }
}

// The gradient of y becomes that of x in place, but for the way through the seed.
DEVICE void blend_backward(const real* x, const real* seed, const real* aux, real* grad,
                           real* grad_seed, int count, real alpha, int style) {
  FOR_ALL(task, count / 4) {
    Four g = load(grad + task * 4), through;
    if (style == ADD) {
      for (int e = 0; e < 4; ++e) through.v[e] = alpha * g.v[e];
    } else if (style == MULTIPLY) {
      const Four a = load(x + task * 4), kept = load(aux + task * 4);
      for (int e = 0; e < 4; ++e) {
        through.v[e] = alpha * g.v[e] * a.v[e] * (1 - kept.v[e] * kept.v[e]);
        g.v[e] *= 1 + alpha * kept.v[e];
      }
    } else {
      const Four s = load(seed + task * 4), kept = load(aux + task * 4);
      for (int e = 0; e < 4; ++e) {
        through.v[e] = alpha * g.v[e] * kept.v[e];
        g.v[e] *= 1 + alpha * s.v[e] * kept.v[e] * (1 - kept.v[e]);
      }
    }
    store(grad_seed + task * 4, through);
    if (style != ADD) store(grad + task * 4, g);
  }
}

// `mask` as in `conv_input_grad`.
DEVICE void add_rows(real* y, const real* x, const real* mask, int count) {
  FOR_ALL(task, count / 4) {
    Four sum = load(y + task * 4);
    add_scaled(sum, 1, load(x + task * 4));
    store(y + task * 4, mask ? passed(sum, load(mask + task * 4)) : sum);
  }
}
