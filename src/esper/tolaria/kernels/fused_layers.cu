// Forward and backward of every layer kind for one network, by all threads of a block.
//
// All activations of a block lie in one workspace as rows of n examples, n a multiple of 4; a
// tensor is where its first row begins. Work is cut into tasks of a few rows by four examples,
// which threads take in turn. A layer ends with all its results written but not yet seen: SYNC
// stands between layers. Sums that many threads share are made by warps in a fixed order, so
// that runs are the same to the bit.
//
// The same text is plain C++, in which one thread takes all tasks: tests run it without a GPU.

#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define ROUTINE static __device__ __noinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define CONSTANT const __grid_constant__
#define FOR_ALL(i, count) for (int i = threadIdx.x; i < (count); i += blockDim.x)
#define FOR_WARPS(i, count) for (int i = threadIdx.x / 32; i < (count); i += blockDim.x / 32)
#define LANE int(threadIdx.x % 32)
#define LANES 32
#define SYNC __syncthreads()
#define BLOCK int(blockIdx.x)
#define NUM_BLOCKS int(gridDim.x)
#define SHARED extern __shared__ __align__(16) unsigned char shared_memory[]
#else
#include <cmath>
using std::exp;
using std::log;
using std::pow;
using std::sqrt;
using std::tanh;
#define DEVICE static inline
#define ROUTINE static
#define KERNEL extern "C" void
#define CONSTANT const
#define FOR_ALL(i, count) for (int i = 0; i < (count); ++i)
#define FOR_WARPS(i, count) for (int i = 0; i < (count); ++i)
#define LANE 0
#define LANES 1
#define SYNC
#define BLOCK 0
#define NUM_BLOCKS 1
#define SHARED unsigned char* const shared_memory = nullptr
#endif

typedef REAL real;

const int WARPS = THREADS / 32;

struct alignas(16) Four {
  real v[4];
};

// One layer as the table has it; see `fused_plan.Column`.
struct Row {
  int kind, channels, height, width, out_channels, out_height, out_width;
  int kernel_height, kernel_width, stride, pad_height, pad_width;
  int channel_step, out_channel_step, position_step;
  int params, transposed, out, saved;
};

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

// A convolution's weights with output channels last, padded with zeros to whole blocks.
DEVICE void transpose(const Row& r, const real* w, real* wt) {
  const int across = padded_channels(r.out_channels), taps = r.channels * num_taps(r);
  FOR_ALL(i, taps * across) {
    const int k = i / across, o = i % across;
    wt[i] = o < r.out_channels ? w[o * taps + k] : real(0);
  }
}

template <int B>
DEVICE void conv_forward(const Row& r, const real* w, const real* wt, const real* x, real* y, int n) {
  const int quads = n / 4, across = padded_channels(r.out_channels);
  const real* bias = w + r.out_channels * r.channels * num_taps(r);
  FOR_ALL(task, across / B * r.out_height * r.out_width * quads) {
    int rest = task;
    const int b = rest % quads * 4;
    rest /= quads;
    const int j = rest % r.out_width;
    rest /= r.out_width;
    const int i = rest % r.out_height, o = rest / r.out_height * B;
    const int top = i * r.stride - r.pad_height, left = j * r.stride - r.pad_width;
    const int first_i = most(0, -top), last_i = least(r.kernel_height, r.height - top);
    const int first_j = most(0, -left), last_j = least(r.kernel_width, r.width - left);
    Four sum[B];
#pragma unroll
    for (int q = 0; q < B; ++q) sum[q] = all_four(o + q < r.out_channels ? bias[o + q] : real(0));
    for (int c = 0; c < r.channels; ++c)
      for (int ti = first_i; ti < last_i; ++ti)
        for (int tj = first_j; tj < last_j; ++tj) {
          const Four seen = load(x + in_row(r, c, top + ti, left + tj) * n + b);
          const real* taps = wt + ((c * r.kernel_height + ti) * r.kernel_width + tj) * across + o;
#pragma unroll
          for (int q = 0; q < B; q += 4) {
            const Four weights = load(taps + q);
#pragma unroll
            for (int e = 0; e < 4; ++e) add_scaled(sum[q + e], weights.v[e], seen);
          }
        }
#pragma unroll
    for (int q = 0; q < B; ++q)
      if (o + q < r.out_channels) store(y + out_row(r, o + q, i, j) * n + b, sum[q]);
  }
}

// Every input collects from the windows it was seen in.
template <int B>
DEVICE void conv_input_grad(const Row& r, const real* wt, const real* gy, real* gx, int n) {
  const int quads = n / 4, across = padded_channels(r.out_channels);
  FOR_ALL(task, ceil_div(r.channels, B) * r.height * r.width * quads) {
    int rest = task;
    const int b = rest % quads * 4;
    rest /= quads;
    const int j = rest % r.width;
    rest /= r.width;
    const int i = rest % r.height, c = rest / r.height * B;
    Four sum[B];
#pragma unroll
    for (int q = 0; q < B; ++q) sum[q] = all_four(0);
    for (int tap = 0; tap < num_taps(r); ++tap) {
      const int top = i + r.pad_height - tap / r.kernel_width;
      const int left = j + r.pad_width - tap % r.kernel_width;
      if (top < 0 || left < 0 || top % r.stride || left % r.stride) continue;
      const int out_i = top / r.stride, out_j = left / r.stride;
      if (out_i >= r.out_height || out_j >= r.out_width) continue;
      for (int o = 0; o < r.out_channels; o += 4) {
        Four grad[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)  // beyond the last channel weights are 0
          grad[e] = load(gy + out_row(r, least(o + e, r.out_channels - 1), out_i, out_j) * n + b);
#pragma unroll
        for (int q = 0; q < B; ++q) {
          const int k = least(c + q, r.channels - 1) * num_taps(r) + tap;
          const Four weights = load(wt + k * across + o);
#pragma unroll
          for (int e = 0; e < 4; ++e) add_scaled(sum[q], weights.v[e], grad[e]);
        }
      }
    }
#pragma unroll
    for (int q = 0; q < B; ++q)
      if (c + q < r.channels) store(gx + in_row(r, c + q, i, j) * n + b, sum[q]);
  }
}

// Adds to `parts`: NUM_PARTS rows of gradients, `columns` apart, whose sum counts. A warp makes
// four output by B input channels at one tap, from its share of the positions and examples.
template <int B>
DEVICE void conv_weight_grad(const Row& r, const real* x, const real* gy, real* parts, int columns,
                             int n) {
  const int quads = n / 4, taps = num_taps(r), area = r.out_height * r.out_width;
  const int blocks_in = ceil_div(r.channels, B), tiles = ceil_div(r.out_channels, 4) * blocks_in * taps;
  const int splits = most(1, least(NUM_PARTS, 2 * WARPS / tiles));
  FOR_WARPS(task, tiles * splits) {
    int rest = task;
    const int split = rest % splits;
    rest /= splits;
    const int tap = rest % taps;
    rest /= taps;
    const int c = rest % blocks_in * B, o = rest / blocks_in * 4;
    real sum[4][B];
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int q = 0; q < B; ++q) sum[e][q] = 0;
    for (int k = split * LANES + LANE; k < area * quads; k += splits * LANES) {
      const int b = k % quads * 4, at = k / quads, i = at / r.out_width, j = at % r.out_width;
      const int seen_i = i * r.stride - r.pad_height + tap / r.kernel_width;
      const int seen_j = j * r.stride - r.pad_width + tap % r.kernel_width;
      if (seen_i < 0 || seen_j < 0 || seen_i >= r.height || seen_j >= r.width) continue;
      Four grad[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        grad[e] = load(gy + out_row(r, least(o + e, r.out_channels - 1), i, j) * n + b);
#pragma unroll
      for (int q = 0; q < B; ++q) {
        const Four seen = load(x + in_row(r, least(c + q, r.channels - 1), seen_i, seen_j) * n + b);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e][q] = dot(grad[e], seen, sum[e][q]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int q = 0; q < B; ++q) {
        const real total = lane_sum(sum[e][q]);
        if (LANE == 0 && o + e < r.out_channels && c + q < r.channels)
          parts[split * columns + ((o + e) * r.channels + c + q) * taps + tap] += total;
      }
  }
}

// The sum of four examples at a time over `count` reals, in every lane.
DEVICE real warp_total(const real* x, int count) {
  real sum = 0;
  for (int k = LANE * 4; k < count; k += LANES * 4) sum = dot(load(x + k), all_four(1), sum);
  return lane_sum(sum);
}

DEVICE void conv_bias_grad(const Row& r, const real* gy, real* part, int n) {
  const int area = r.out_height * r.out_width;
  real* bias = part + r.out_channels * r.channels * num_taps(r);
  FOR_WARPS(o, r.out_channels) {
    real sum = 0;
    for (int k = LANE; k < area * n; k += LANES)
      sum += gy[(o * r.out_channel_step + k / n * r.position_step) * n + k % n];
    sum = lane_sum(sum);
    if (LANE == 0) bias[o] += sum;
  }
}

DEVICE void depthwise_forward(const Row& r, const real* w, const real* x, real* y, int n) {
  const int quads = n / 4, taps = num_taps(r), area = r.height * r.width;
  FOR_ALL(task, r.channels * area * quads) {
    const int b = task % quads * 4, row = task / quads;
    const int c = row / area, i = row % area / r.width, j = row % r.width;
    Four sum = all_four(w[r.channels * taps + c]);
    for (int tap = 0; tap < taps; ++tap) {
      const int seen_i = i - r.pad_height + tap / r.kernel_width;
      const int seen_j = j - r.pad_width + tap % r.kernel_width;
      if (seen_i < 0 || seen_j < 0 || seen_i >= r.height || seen_j >= r.width) continue;
      add_scaled(sum, w[c * taps + tap], load(x + (c * area + seen_i * r.width + seen_j) * n + b));
    }
    store(y + row * n + b, sum);
  }
}

DEVICE void depthwise_backward(const Row& r, const real* w, real* part, const real* x,
                               const real* gy, real* gx, int n) {
  const int quads = n / 4, taps = num_taps(r), area = r.height * r.width;
  FOR_ALL(task, r.channels * area * quads) {
    const int b = task % quads * 4, row = task / quads;
    const int c = row / area, i = row % area / r.width, j = row % r.width;
    Four sum = all_four(0);
    for (int tap = 0; tap < taps; ++tap) {
      const int out_i = i + r.pad_height - tap / r.kernel_width;
      const int out_j = j + r.pad_width - tap % r.kernel_width;
      if (out_i < 0 || out_j < 0 || out_i >= r.height || out_j >= r.width) continue;
      add_scaled(sum, w[c * taps + tap], load(gy + (c * area + out_i * r.width + out_j) * n + b));
    }
    store(gx + row * n + b, sum);
  }
  FOR_WARPS(task, r.channels * (taps + 1)) {
    const int c = task % r.channels, tap = task / r.channels;
    const bool is_bias = tap == taps;
    const int down = is_bias ? 0 : tap / r.kernel_width - r.pad_height;
    const int right = is_bias ? 0 : tap % r.kernel_width - r.pad_width;
    real sum = 0;
    for (int k = LANE; k < area * quads; k += LANES) {
      const int b = k % quads * 4, at = k / quads, i = at / r.width + down, j = at % r.width + right;
      if (i < 0 || j < 0 || i >= r.height || j >= r.width) continue;
      const Four seen = is_bias ? all_four(1) : load(x + (c * area + i * r.width + j) * n + b);
      sum = dot(load(gy + (c * area + at) * n + b), seen, sum);
    }
    sum = lane_sum(sum);
    if (LANE == 0) part[is_bias ? r.channels * taps + c : c * taps + tap] += sum;
  }
}

// Slices of an example's values that are summed side by side.
DEVICE int num_slices(int count, int n) { return most(1, least(count, THREADS / (n / 4))); }

// `saved`: the normalised values, then a row with the inverse deviations.
DEVICE void norm_forward(const Row& r, const real* w, const real* x, real* y, real* saved,
                         real* scratch, int n) {
  const int quads = n / 4, area = r.height * r.width, count = r.channels * area;
  const int slices = num_slices(count, n);
  FOR_ALL(task, slices * quads) {
    const int b = task % quads * 4, slice = task / quads;
    Four mean = all_four(0), spread = all_four(0);
    int seen = 0;
    for (int row = slice; row < count; row += slices, ++seen) add_scaled(mean, 1, load(x + row * n + b));
    for (int e = 0; e < 4; ++e) mean.v[e] /= seen;
    for (int row = slice; row < count; row += slices) {
      Four off = load(x + row * n + b);
      for (int e = 0; e < 4; ++e) spread.v[e] += (off.v[e] - mean.v[e]) * (off.v[e] - mean.v[e]);
    }
    store(scratch + 2 * slice * n + b, mean);
    store(scratch + (2 * slice + 1) * n + b, spread);
  }
  SYNC;
  FOR_ALL(task, slices * quads) {
    const int b = task % quads * 4, slice = task / quads;
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
      store(y + row * n + b, value);
    }
  }
}

// In place: the gradient of the outputs becomes that of the inputs.
DEVICE void norm_backward(const Row& r, const real* w, real* part, const real* saved, real* grad,
                          real* scratch, int n) {
  const int quads = n / 4, area = r.height * r.width, count = r.channels * area;
  const int slices = num_slices(count, n);
  FOR_ALL(task, slices * quads) {
    const int b = task % quads * 4, slice = task / quads;
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
  FOR_ALL(task, slices * quads) {
    const int b = task % quads * 4, slice = task / quads;
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
  FOR_ALL(task, count / 4) {
    Four value = load(x + task * 4);
    for (int e = 0; e < 4; ++e) value.v[e] = value.v[e] <= 0 ? 0 : value.v[e];  // a nan stays
    store(y + task * 4, value);
  }
}

DEVICE void relu_backward(const real* y, real* grad, int count) {
  FOR_ALL(task, count / 4) {
    const Four value = load(y + task * 4);
    Four g = load(grad + task * 4);
    for (int e = 0; e < 4; ++e) g.v[e] = value.v[e] <= 0 ? 0 : g.v[e];
    store(grad + task * 4, g);
  }
}

// Every row of an example gets a number of its own.
DEVICE void code_forward(const Row& r, const real* w, const real* x, real* y, int n) {
  const int quads = n / 4;
  FOR_ALL(task, num_inputs(r) * quads) {
    Four value = load(x + task * 4);
    add_scaled(value, w[task / quads], all_four(1));
    store(y + task * 4, value);
  }
}

DEVICE void code_backward(const Row& r, real* part, const real* gy, int n) {
  FOR_WARPS(row, num_inputs(r)) {
    const real total = warp_total(gy + row * n, n);
    if (LANE == 0) part[row] += total;
  }
}

// Softmax over keys of scaled products of queries and keys, then the values so weighted. Input:
// queries, keys and values `[3 * width, length]`; `saved`: the weights `[length, length]`.
DEVICE void attend_forward(const Row& r, const real* x, real* y, real* saved, int n) {
  const int quads = n / 4, width = r.out_channels, length = r.width;
  const real scale = 1 / sqrt(real(width));
  FOR_ALL(task, length * quads) {
    const int b = task % quads * 4, i = task / quads;
    real* share = saved + i * length * n + b;
    Four top = all_four(0), total = all_four(0);
    for (int m = 0; m < length; ++m) {
      Four score = all_four(0);
      for (int c = 0; c < width; ++c) {
        const Four query = load(x + (c * length + i) * n + b);
        const Four key = load(x + ((width + c) * length + m) * n + b);
        for (int e = 0; e < 4; ++e) score.v[e] += query.v[e] * key.v[e];
      }
      for (int e = 0; e < 4; ++e)
        top.v[e] = m == 0 || score.v[e] > top.v[e] ? score.v[e] : top.v[e];
      store(share + m * n, score);
    }
    for (int m = 0; m < length; ++m) {
      Four score = load(share + m * n);
      for (int e = 0; e < 4; ++e) {
        score.v[e] = exp((score.v[e] - top.v[e]) * scale);
        total.v[e] += score.v[e];
      }
      store(share + m * n, score);
    }
    for (int m = 0; m < length; ++m) {
      Four score = load(share + m * n);
      for (int e = 0; e < 4; ++e) score.v[e] /= total.v[e];
      store(share + m * n, score);
    }
    for (int c = 0; c < width; ++c) {
      Four sum = all_four(0);
      for (int m = 0; m < length; ++m) {
        const Four weight = load(share + m * n);
        const Four value = load(x + ((2 * width + c) * length + m) * n + b);
        for (int e = 0; e < 4; ++e) sum.v[e] += weight.v[e] * value.v[e];
      }
      store(y + (c * length + i) * n + b, sum);
    }
  }
}

// `scores` is room for the gradients of the scores `[length, length]`.
DEVICE void attend_backward(const Row& r, const real* x, const real* saved, const real* gy, real* gx,
                            real* scores, int n) {
  const int quads = n / 4, width = r.out_channels, length = r.width;
  const real scale = 1 / sqrt(real(width));
  FOR_ALL(task, length * quads) {
    const int b = task % quads * 4, i = task / quads;
    const real* share = saved + i * length * n + b;
    real* grads = scores + i * length * n + b;
    Four inner = all_four(0);
    for (int m = 0; m < length; ++m) {
      Four grad = all_four(0);
      for (int c = 0; c < width; ++c) {
        const Four out = load(gy + (c * length + i) * n + b);
        const Four value = load(x + ((2 * width + c) * length + m) * n + b);
        for (int e = 0; e < 4; ++e) grad.v[e] += out.v[e] * value.v[e];
      }
      const Four weight = load(share + m * n);
      for (int e = 0; e < 4; ++e) inner.v[e] += weight.v[e] * grad.v[e];
      store(grads + m * n, grad);
    }
    for (int m = 0; m < length; ++m) {
      Four grad = load(grads + m * n);
      const Four weight = load(share + m * n);
      for (int e = 0; e < 4; ++e) grad.v[e] = weight.v[e] * (grad.v[e] - inner.v[e]) * scale;
      store(grads + m * n, grad);
    }
  }
  SYNC;
  // queries follow keys along a row of scores, keys follow queries and values outputs down a column
  FOR_ALL(task, 3 * width * length * quads) {
    const int b = task % quads * 4, row = task / quads;
    const int third = row / (width * length), c = row / length % width, at = row % length;
    const real* against = third == 2 ? gy : third == 1 ? x : x + width * length * n;
    const real* weights = third == 2 ? saved : scores;
    const int first = third == 0 ? at * length : at, step = third == 0 ? 1 : length;
    Four sum = all_four(0);
    for (int m = 0; m < length; ++m) {
      const Four weight = load(weights + (first + m * step) * n + b);
      const Four other = load(against + (c * length + m) * n + b);
      for (int e = 0; e < 4; ++e) sum.v[e] += weight.v[e] * other.v[e];
    }
    store(gx + row * n + b, sum);
  }
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

DEVICE void add_rows(real* y, const real* x, int count) {
  FOR_ALL(task, count / 4) {
    Four sum = load(y + task * 4);
    add_scaled(sum, 1, load(x + task * 4));
    store(y + task * 4, sum);
  }
}
