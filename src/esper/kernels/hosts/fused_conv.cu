// Convolutions and depthwise convolutions of one network, forward and backward.
//
// All activations of a block lie in one workspace as rows of n examples, n a multiple of 4; a
// tensor is where its first row begins. Work is cut into tasks of a few rows by four examples,
// which threads take in turn; channels beyond the last are read, and what comes of them is not
// written: there is room for that everywhere. A layer ends with all its results written but not
// yet seen: SYNC stands between layers. Sums that many threads share are made by warps in a fixed
// order, so that runs are bit-exact.
//
// Parity test: tests/tolaria/test_fused.py.

// How many channels a task takes: as many as do not make the threads with most tasks slower.
DEVICE int task_channels(int channels, int area, int n) {
  int best = 4, least_time = 1 << 30;
  for (int block = 4; block <= MOST_CHANNELS; block *= 2) {
    const int time = ceil_div(ceil_div(channels, block) * area, num_teams(n)) * block;
    if (time <= least_time) best = block, least_time = time;
  }
  return best;
}

// Adds to B sums U rows of x, each times weights that lie side by side.
template <int B, int U>
DEVICE void add_weighted(Four (&sum)[B], const real* x, int x_step, const real* wt, int wt_step) {
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

// A task is one position of B output channels; four input channels are loaded side by side.
template <int B>
ROUTINE void conv_forward_by(const Row& row, const real* w, const real* wt, const real* x, real* y,
                             bool rectifies, int n) {
  const Row r = row;
  w = global(w), wt = transposed(wt), x = global(x), y = global(y);
  const int across = padded_channels(r.out_channels), taps = num_taps(r);
  const int x_step = r.channel_step * n, wt_step = taps * across;
  const real* bias = w + r.out_channels * r.channels * taps;
  FOR_QUADS(task, b, ceil_div(r.out_channels, B) * r.out_height * r.out_width, n) {
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
          add_weighted<B, 4>(sum, seen, x_step, weights, wt_step);
        for (; c < r.channels; ++c, seen += x_step, weights += wt_step)
          add_weighted<B, 1>(sum, seen, x_step, weights, wt_step);
      }
    real* out = y + out_row(r, o, i, j) * n + b;
#pragma unroll
    for (int q = 0; q < B; ++q)
      if (o + q < r.out_channels)
        store(out + q * r.out_channel_step * n, rectifies ? rectified(sum[q]) : sum[q]);
  }
}

DEVICE void conv_forward(const Row& r, const real* w, const real* wt, const real* x, real* y,
                         bool rectifies, int n) {
  switch (task_channels(r.out_channels, r.out_height * r.out_width, n)) {
    case 16: conv_forward_by<16>(r, w, wt, x, y, rectifies, n); break;
    case 8: conv_forward_by<8>(r, w, wt, x, y, rectifies, n); break;
    default: conv_forward_by<4>(r, w, wt, x, y, rectifies, n);
  }
}

// The windows in which an input at `at` was seen, along one axis: the taps first, first + stride,
// ..., below last, and the output that saw it through the first.
struct Seen {
  int first, last, out;

  DEVICE_MEMBER Seen(int at, int stride, int kernel, int outputs) {
    first = at % stride;
    out = at / stride;
    const int skipped = most(0, out - outputs + 1);
    first += skipped * stride;
    out -= skipped;
    last = least(kernel, first + (out + 1) * stride);
  }
};

// Every input collects from the windows it was seen in. If `adds`, the result is added to what is
// there. If the inputs come from a rectifier, `mask` are those inputs, and the gradient is that of
// what went into it.
template <int B>
ROUTINE void conv_input_grad_by(const Row& row, const real* wt, const real* gy, real* gx, bool adds,
                            const real* mask, int n) {
  const Row r = row;
  wt = transposed(wt), gy = global(gy), gx = global(gx);
  const int across = padded_channels(r.out_channels), taps = num_taps(r);
  const int out_step = r.out_channel_step * n, channel_step = r.channel_step * n;
  FOR_QUADS(task, b, ceil_div(r.channels, B) * r.height * r.width, n) {
    const int j = task % r.width, i = task / r.width % r.height;
    const int c = task / r.width / r.height * B, at = in_row(r, c, i, j) * n + b;
    const Seen down(i + r.pad_height, r.stride, r.kernel_height, r.out_height);
    const Seen right(j + r.pad_width, r.stride, r.kernel_width, r.out_width);
    Four sum[B];
#pragma unroll
    for (int q = 0; q < B; ++q)
      sum[q] = adds && c + q < r.channels ? load(gx + at + q * channel_step) : all_four(0);
    for (int ti = down.first, out_i = down.out; ti < down.last; ti += r.stride, --out_i)
      for (int tj = right.first, out_j = right.out; tj < right.last; tj += r.stride, --out_j) {
        const real* from = gy + out_row(r, 0, out_i, out_j) * n + b;
        const real* to = wt + (c * taps + ti * r.kernel_width + tj) * across;
        for (int o = 0; o < r.out_channels; o += 4, from += 4 * out_step, to += 4) {
          Four grad[4];
#pragma unroll
          for (int e = 0; e < 4; ++e)  // beyond the last channel weights are 0
            grad[e] = load(from + least(e, r.out_channels - 1 - o) * out_step);
#pragma unroll
          for (int q = 0; q < B; ++q) {
            const Four weights = load(to + q * taps * across);
#pragma unroll
            for (int e = 0; e < 4; ++e) add_scaled(sum[q], weights.v[e], grad[e]);
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

DEVICE void conv_input_grad(const Row& r, const real* wt, const real* gy, real* gx, bool adds,
                            const real* mask, int n) {
  switch (task_channels(r.channels, r.height * r.width, n)) {
    case 16: conv_input_grad_by<16>(r, wt, gy, gx, adds, mask, n); break;
    case 8: conv_input_grad_by<8>(r, wt, gy, gx, adds, mask, n); break;
    default: conv_input_grad_by<4>(r, wt, gy, gx, adds, mask, n);
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
ROUTINE void conv_weight_grad_by(const Row& row, const real* x, const real* gy, real* parts,
                                 int columns, int n) {
  const Row r = row;
  x = global(x), gy = global(gy);
  const int taps = num_taps(r), blocks_in = ceil_div(r.channels, B);
  const int tiles = ceil_div(r.out_channels, 4) * blocks_in * taps;
  const int splits = most(1, least(NUM_PARTS, 3 * WARPS / tiles));
  const int skipped = splits * LANES % (n / 4) * 4, positions = splits * LANES / (n / 4);
  FOR_WARPS(task, tiles * splits) {
    const int split = task % splits, tap = task / splits % taps;
    const int c = task / splits / taps % blocks_in * B, o = task / splits / taps / blocks_in * 4;
    const int down = tap / r.kernel_width - r.pad_height;
    const int right = tap % r.kernel_width - r.pad_width;
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

DEVICE void conv_weight_grad(const Row& r, const real* x, const real* gy, real* parts, int columns,
                             int n) {
  if (r.channels == 1)
    conv_weight_grad_by<1>(r, x, gy, parts, columns, n);
  else if (r.channels % 8 > 0 && r.channels % 8 <= 4)
    conv_weight_grad_by<4>(r, x, gy, parts, columns, n);
  else
    conv_weight_grad_by<8>(r, x, gy, parts, columns, n);
}

DEVICE void conv_bias_grad(const Row& r, const real* gy, real* part, int n) {
  const int area = r.out_height * r.out_width;
  real* bias = part + r.out_channels * r.channels * num_taps(r);
  FOR_WARPS(o, r.out_channels) {
    const real* from = gy + o * r.out_channel_step * n;
    real sum = 0;
    if (r.position_step == 1)
      sum = warp_total(from, area * n);
    else
      for (int at = 0; at < area; ++at) sum += warp_total(from + at * r.position_step * n, n);
    if (LANE == 0) bias[o] += sum;
  }
}

// A task is four neighbouring positions of a channel; `turn` is 1 on the way there, and -1 on the
// way back, where the same kernel is mirrored.
ROUTINE void depthwise(const Row& row, const real* w, const real* bias, const real* x, real* y,
                      int turn, int n) {
  const Row r = row;
  w = global(w), x = global(x), y = global(y);
  const int blocks = ceil_div(r.width, 4);
  const bool rectifies = turn > 0 && r.rectifies;
  FOR_QUADS(task, b, r.channels * r.height * blocks, n) {
    const int j = task % blocks * 4, i = task / blocks % r.height, c = task / blocks / r.height;
    const real* taps = w + c * num_taps(r);
    Four sum[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) sum[u] = all_four(bias ? bias[c] : real(0));
    for (int ti = 0; ti < r.kernel_height; ++ti) {
      const int seen_i = i + turn * (ti - r.pad_height);
      if (seen_i < 0 || seen_i >= r.height) continue;
      for (int tj = 0; tj < r.kernel_width; ++tj) {
        const int seen_j = j + turn * (tj - r.pad_width);
        Four value[4];
#pragma unroll
        for (int u = 0; u < 4; ++u)
          value[u] = seen_j + u >= 0 && seen_j + u < r.width
                         ? load(x + in_row(r, c, seen_i, seen_j + u) * n + b)
                         : all_four(0);
#pragma unroll
        for (int u = 0; u < 4; ++u) add_scaled(sum[u], taps[ti * r.kernel_width + tj], value[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (j + u < r.width)
        store(y + in_row(r, c, i, j + u) * n + b, rectifies ? rectified(sum[u]) : sum[u]);
  }
}

// A warp makes eight taps of a channel.
ROUTINE void depthwise_weight_grad(const Row& row, real* part, const real* x, const real* gy,
                                   int n) {
  const Row r = row;
  x = global(x), gy = global(gy);
  const int taps = num_taps(r), blocks = ceil_div(taps, 8);
  const int skipped = LANES % (n / 4) * 4, positions = LANES / (n / 4);
  FOR_WARPS(task, r.channels * blocks) {
    const int c = task / blocks, first = task % blocks * 8;
    real sum[8];
#pragma unroll
    for (int q = 0; q < 8; ++q) sum[q] = 0;
    for (Walk at(r, 0, n); at.i < r.height; at.advance(r, skipped, positions, n)) {
      const Four grad = load(gy + in_row(r, c, at.i, at.j) * n + at.b);
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        const int i = at.i + (first + q) / r.kernel_width - r.pad_height;
        const int j = at.j + (first + q) % r.kernel_width - r.pad_width;
        if (i >= 0 && j >= 0 && i < r.height && j < r.width)
          sum[q] = dot(grad, load(x + in_row(r, c, i, j) * n + at.b), sum[q]);
      }
    }
    lane_sums(sum, [&](int which, real total) {
      if (first + which < taps) part[c * taps + first + which] += total;
    });
  }
  FOR_WARPS(c, r.channels) {
    const real total = warp_total(gy + c * r.channel_step * n, r.channel_step * n);
    if (LANE == 0) part[r.channels * taps + c] += total;
  }
}

