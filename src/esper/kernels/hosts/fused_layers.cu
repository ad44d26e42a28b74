// The other layers, and how seeds join their hosts.
//
// Parity test: tests/tolaria/test_fused.py.

// Slices of an example's values that are summed side by side.
DEVICE int num_slices(int count, int n) { return least(count, num_teams(n)); }

// Calls `use(row, values...)` for the rows of a slice, four of which are loaded side by side.
template <class Use>
DEVICE void for_slice(int slice, int slices, int count, const real* x, int n, Use use) {
  for (int first = slice; first < count; first += 4 * slices) {
    Four value[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) value[u] = load(x + least(first + u * slices, count - 1) * n);
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (first + u * slices < count) use(first + u * slices, value[u]);
  }
}

template <class Use>
DEVICE void for_slice(int slice, int slices, int count, const real* x, const real* z, int n,
                      Use use) {
  for (int first = slice; first < count; first += 4 * slices) {
    Four value[4], other[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      value[u] = load(x + least(first + u * slices, count - 1) * n);
      other[u] = load(z + least(first + u * slices, count - 1) * n);
    }
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (first + u * slices < count) use(first + u * slices, value[u], other[u]);
  }
}

// `saved`: the normalised values, then a row with the inverse deviations.
ROUTINE void norm_forward(const Row& row, const real* w, const real* x, real* y, real* saved,
                         real* scratch, int n) {
  const Row r = row;
  w = global(w), x = global(x), y = global(y), saved = global(saved), scratch = shared(scratch);
  const int area = r.height * r.width, count = r.channels * area, slices = num_slices(count, n);
  FOR_QUADS(slice, b, slices, n) {
    Four mean = all_four(0), spread = all_four(0);
    for_slice(slice, slices, count, x + b, n, [&](int, const Four& v) { add_scaled(mean, 1, v); });
    const real share = real(1) / ((count - slice + slices - 1) / slices);
    for (int e = 0; e < 4; ++e) mean.v[e] *= share;
    for_slice(slice, slices, count, x + b, n, [&](int, const Four& value) {
      for (int e = 0; e < 4; ++e)
        spread.v[e] += (value.v[e] - mean.v[e]) * (value.v[e] - mean.v[e]);
    });
    store(scratch + 2 * slice * n + b, mean);
    store(scratch + (2 * slice + 1) * n + b, spread);
  }
  SYNC;
  FOR_QUADS(slice, b, slices, n) {
    Four mean = all_four(0), inverse = all_four(0);
    for (int s = 0; s < slices; ++s) {
      const real seen = (count - s + slices - 1) / slices;
      add_scaled(mean, seen / count, load(scratch + 2 * s * n + b));
    }
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
    for_slice(slice, slices, count, x + b, n, [&](int row, Four value) {
      const real weight = w[row / area], bias = w[r.channels + row / area];
      for (int e = 0; e < 4; ++e) value.v[e] = (value.v[e] - mean.v[e]) * inverse.v[e];
      store(saved + row * n + b, value);
      for (int e = 0; e < 4; ++e) value.v[e] = value.v[e] * weight + bias;
      store(y + row * n + b, r.rectifies ? rectified(value) : value);
    });
  }
}

// In place: the gradient of the outputs becomes that of the inputs.
ROUTINE void norm_backward(const Row& row, const real* w, real* part, const real* saved, real* grad,
                          real* scratch, int n) {
  const Row r = row;
  w = global(w), saved = global(saved), grad = global(grad), scratch = shared(scratch);
  const int area = r.height * r.width, count = r.channels * area, slices = num_slices(count, n);
  FOR_QUADS(slice, b, slices, n) {
    Four mean = all_four(0), product = all_four(0);
    for_slice(slice, slices, count, grad + b, saved + b, n, [&](int row, Four g, Four value) {
      const real weight = w[row / area];
      for (int e = 0; e < 4; ++e) {
        mean.v[e] += weight * g.v[e];
        product.v[e] += weight * g.v[e] * value.v[e];
      }
    });
    store(scratch + 2 * slice * n + b, mean);
    store(scratch + (2 * slice + 1) * n + b, product);
  }
  FOR_WARPS(c, r.channels) {
    real sum[2] = {0, 0};
#pragma unroll 4
    for (int k = LANE * 4; k < area * n; k += LANES * 4) {
      const Four g = load(grad + c * area * n + k);
      sum[0] = dot(g, load(saved + c * area * n + k), sum[0]);
      sum[1] = dot(g, all_four(1), sum[1]);
    }
    lane_sums(sum, [&](int which, real total) { part[which * r.channels + c] += total; });
  }
  SYNC;
  FOR_QUADS(slice, b, slices, n) {
    Four mean = all_four(0), product = all_four(0);
    for (int s = 0; s < slices; ++s) {
      add_scaled(mean, real(1) / count, load(scratch + 2 * s * n + b));
      add_scaled(product, real(1) / count, load(scratch + (2 * s + 1) * n + b));
    }
    const Four inverse = load(saved + count * n + b);
    for_slice(slice, slices, count, grad + b, saved + b, n, [&](int row, Four g, Four value) {
      const real weight = w[row / area];
      for (int e = 0; e < 4; ++e)
        g.v[e] = (weight * g.v[e] - mean.v[e] - value.v[e] * product.v[e]) * inverse.v[e];
      store(grad + row * n + b, g);
    });
  }
}

// out = make(in...) value by value over `count` reals; two tasks of a thread are loaded side by
// side. A null output is left out.
template <int IN, int OUT, class Make>
DEVICE void map_rows(const real* const (&in)[IN], real* const (&out)[OUT], int count, Make make) {
  for (int first = THREAD; first < count / 4; first += 2 * STRIDE) {
    const int second = first + STRIDE, at = 4 * least(second, count / 4 - 1);
    Four value[IN], other[IN], made[OUT];
#pragma unroll
    for (int k = 0; k < IN; ++k) {
      value[k] = load(in[k] + first * 4);
      other[k] = load(in[k] + at);
    }
    make(value, made);
#pragma unroll
    for (int k = 0; k < OUT; ++k)
      if (out[k]) store(out[k] + first * 4, made[k]);
    if (second >= count / 4) continue;
    make(other, made);
#pragma unroll
    for (int k = 0; k < OUT; ++k)
      if (out[k]) store(out[k] + at, made[k]);
  }
}

DEVICE void relu_forward(const real* x, real* y, int count) {
  map_rows<1, 1>({x}, {y}, count, [](Four (&in)[1], Four (&out)[1]) { out[0] = rectified(in[0]); });
}

DEVICE void relu_backward(const real* y, real* grad, int count) {
  map_rows<2, 1>({grad, y}, {grad}, count,
                 [](Four (&in)[2], Four (&out)[1]) { out[0] = passed(in[0], in[1]); });
}

// Every row of an example gets a number of its own.
DEVICE void code_forward(const Row& r, const real* w, const real* x, real* y, int n) {
  FOR_QUADS(row, b, num_inputs(r), n) {
    Four value = load(x + row * n + b);
    add_scaled(value, w[row], all_four(1));
    store(y + row * n + b, value);
  }
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
DEVICE void multiply(Matrix<real> out, Matrix<const real> a, Matrix<const real> b, int height,
                     int width, int depth, int n) {
  const int blocks = ceil_div(width, 4);
  FOR_QUADS(task, at, ceil_div(height, 4) * blocks, n) {
    const int i = task / blocks * 4, j = task % blocks * 4;
    Four sum[4][4];
#pragma unroll
    for (int e = 0; e < 16; ++e) sum[e / 4][e % 4] = all_four(0);
    const real *from = a.at + i * a.down * n + at, *with = b.at + j * b.down * n + at;
    for (int k = 0; k < depth; ++k, from += a.right * n, with += b.right * n) {
      Four left[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) left[e] = load(from + e * a.down * n);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const Four right = load(with + q * b.down * n);
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
ROUTINE void attend_forward(const Row& row, const real* x, real* y, real* saved, int n) {
  const Row r = row;
  x = global(x), y = global(y), saved = global(saved);
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
ROUTINE void attend_backward(const Row& row, const real* x, const real* saved, const real* gy,
                             real* gx, real* scores, int n) {
  const Row r = row;
  x = global(x), saved = global(saved), gy = global(gy);
  gx = global(gx), scores = global(scores);
  const int width = r.out_channels, length = r.width, size = width * length * n;
  const real scale = 1 / sqrt(real(width));
  const real *keys = x + size, *values = x + 2 * size;
  multiply({scores, length, 1}, {gy, 1, length}, {values, 1, length}, length, length, width, n);
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
  real *g_keys = gx + size, *g_values = gx + 2 * size;
  multiply({gx, length, 1}, {keys, length, 1}, {scores, length, 1}, width, length, length, n);
  multiply({g_keys, length, 1}, {x, length, 1}, {scores, 1, length}, width, length, length, n);
  multiply({g_values, length, 1}, {gy, length, 1}, {saved, 1, length}, width, length, length, n);
}

// x + alpha * change; `aux` keeps tanh(seed) or the gate for the way back.
DEVICE void blend_forward(const real* x, const real* seed, real* y, real* aux, int count,
                          real alpha, int style) {
  map_rows<2, 2>({x, seed}, {y, style == ADD ? nullptr : aux}, count,
                 [=](Four (&in)[2], Four (&out)[2]) {
                   for (int e = 0; e < 4; ++e) {
                     const real a = in[0].v[e], s = in[1].v[e];
                     if (style == ADD) {
                       out[0].v[e] = a + alpha * s;
                     } else if (style == MULTIPLY) {
                       out[1].v[e] = tanh(s);
                       out[0].v[e] = a + alpha * a * out[1].v[e];
                     } else {
                       out[1].v[e] = 1 / (1 + exp(-a));
                       out[0].v[e] = a + alpha * out[1].v[e] * s;
                     }
                   }
                 });
}

// The gradient of y becomes that of x in place, but for the way through the seed.
DEVICE void blend_backward(const real* x, const real* seed, const real* aux, real* grad,
                           real* grad_seed, int count, real alpha, int style) {
  if (style == ADD)
    map_rows<1, 1>({grad}, {grad_seed}, count, [=](Four (&in)[1], Four (&out)[1]) {
      for (int e = 0; e < 4; ++e) out[0].v[e] = alpha * in[0].v[e];
    });
  else
    map_rows<3, 2>({grad, aux, style == MULTIPLY ? x : seed}, {grad_seed, grad}, count,
                   [=](Four (&in)[3], Four (&out)[2]) {
                     for (int e = 0; e < 4; ++e) {
                       const real g = in[0].v[e], kept = in[1].v[e], other = in[2].v[e];
                       if (style == MULTIPLY) {
                         out[0].v[e] = alpha * g * other * (1 - kept * kept);
                         out[1].v[e] = g * (1 + alpha * kept);
                       } else {
                         out[0].v[e] = alpha * g * kept;
                         out[1].v[e] = g * (1 + alpha * other * kept * (1 - kept));
                       }
                     }
                   });
}

// A layer's output with the output of a seed that widens it, then rectified if the layer is.
DEVICE void widen_rows(real* y, const real* seed, int count, real alpha, bool rectifies) {
  map_rows<2, 1>({y, seed}, {y}, count, [=](Four (&in)[2], Four (&out)[1]) {
    add_scaled(in[0], alpha, in[1]);
    out[0] = rectifies ? rectified(in[0]) : in[0];
  });
}

DEVICE void scale_rows(real* x, int count, real factor) {
  map_rows<1, 1>({x}, {x}, count, [=](Four (&in)[1], Four (&out)[1]) {
    for (int e = 0; e < 4; ++e) out[0].v[e] = factor * in[0].v[e];
  });
}

// `mask` as in `conv_input_grad`.
DEVICE void add_rows(real* y, const real* x, const real* mask, int count) {
  map_rows<3, 1>({y, x, mask ? mask : y}, {y}, count, [=](Four (&in)[3], Four (&out)[1]) {
    add_scaled(in[0], 1, in[1]);
    out[0] = mask ? passed(in[0], in[2]) : in[0];
  });
}
