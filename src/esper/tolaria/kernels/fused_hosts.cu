// Whole hosts with their seeds, a block each: logits, and training minibatch by minibatch.
//
// Hosts do not depend on one another, so a block takes its host through all its minibatches
// before the next one. What a host runs, and where its activations lie, is read from tables that
// are the same for all hosts of a population (see `fused_plan`).

// Field by field what `fused.Arguments` is.
struct Args {
  // tables
  const Row* programs;       // [programs, longest]: segments, head, then seeds
  const int* lengths;        // [programs]
  const int* host_starts;    // [S + 1]: where the parameters of segments and head begin
  const int* seed_programs;  // [S, B]
  const int* seed_sizes;     // [S, B]
  const int* part_starts;    // [S + 2]: columns where host, seeds and the row itself begin and end
  const int* slot_rows;      // [S, 2]: what the blend keeps, and the blended rows
  // hosts
  real* params;  // [P + 1, D]
  real* grads;
  real* moments;       // [moments, P + 1, D]
  real* steps;         // [P, 1 + S]
  const real* rates;   // [P]
  const real* alpha;   // [P, S], and so are the next four
  const real* alpha_behind;
  const long long* style;
  const int* blueprint;
  const int* behind;
  // data
  const real* inputs;           // train: [rows, features]; logits: [P, features, rows]
  const long long* labels;      // [rows]
  const long long* first_row;   // [P]
  const long long* batch_rows;  // [M, P, batch]
  real* losses;                 // [M, P]
  const int* ablated;           // slots
  real* logits;                 // [P, classes, 1 + ablated, rows]
  real* workspace;              // [blocks, room]
  // optimizer
  double beta_mean, beta_square, epsilon, weight_decay;
  int is_adamw;
  // sizes
  int longest, num_hosts, num_slots, num_blueprints, columns, features, classes;
  int minibatches, batch, rows, num_ablated;
  int n;          // examples worked on at a time, a multiple of 4
  int room;       // reals of a block's workspace
  int grad_rows;  // where the first of three tensors of gradients begins
  int grad_size;  // rows of each
  int score_rows;
  // reals into shared memory, or -1 - reals into the workspace
  int scratch_at, transposed_at, parts_at;
};

// What a block works with.
struct Work {
  real *ws, *scratch, *wt, *parts;
  const real* w;
  int p;
  bool shadow;  // seeds behind the host are switched on
};

const int NO_SLOT = -1;
const int LOSSES_AT = 8 * THREADS;  // in the scratch room, behind what norms use

DEVICE real* placed(int at, real* shared, real* ws) { return at >= 0 ? shared + at : ws - 1 - at; }

DEVICE Work work_of(const Args& a, real* shared) {
  Work k;
  k.ws = a.workspace + (long long)BLOCK * a.room;
  k.scratch = placed(a.scratch_at, shared, k.ws);
  k.wt = placed(a.transposed_at, shared, k.ws);
  k.parts = placed(a.parts_at, shared, k.ws);
  return k;
}

// The blueprint in a slot that takes part in this pass, or -1.
DEVICE int active_blueprint(const Args& a, const Work& k, int slot) {
  const int at = k.p * a.num_slots + slot;
  return !k.shadow && a.behind[at] ? -1 : a.blueprint[at];
}

DEVICE const Row& last_row(const Args& a, int program) {
  return a.programs[program * a.longest + a.lengths[program] - 1];
}

// The output's first row of a program with parameters at `w`, on the rows that begin at `x`.
ROUTINE int run_forward(const Args& a, const Work& k, int program, const real* w, int x) {
  const int n = a.n;
  for (int number = 0; number < a.lengths[program]; ++number) {
    const Row r = a.programs[program * a.longest + number];
    const real *in = k.ws + x * n, *weights = w + r.params;
    real *out = k.ws + r.out * n, *saved = k.ws + r.saved * n;
    switch (r.kind) {
      case CONV:
        if (channel_block(r.out_channels) == 8)
          conv_forward<8>(r, weights, k.wt + r.transposed, in, out, n);
        else
          conv_forward<4>(r, weights, k.wt + r.transposed, in, out, n);
        break;
      case DEPTHWISE: depthwise_forward(r, weights, in, out, n); break;
      case NORM: norm_forward(r, weights, in, out, saved, k.scratch, n); break;
      case RELU: relu_forward(in, out, num_inputs(r) * n); break;
      case CODE: code_forward(r, weights, in, out, n); break;
      case ATTEND: attend_forward(r, in, out, saved, n); break;
    }
    SYNC;
    x = r.out;
  }
  return x;
}

// Adds the gradients of a program's parameters to `parts`. Of the two tensors of gradients,
// `grad` holds that of the output; the one that is returned holds that of the input.
ROUTINE int run_backward(const Args& a, const Work& k, int program, int start, int x, int grad,
                         int other, bool needs_input_grad) {
  const int n = a.n;
  for (int number = a.lengths[program] - 1; number >= 0; --number) {
    const Row* row = a.programs + program * a.longest + number;
    const Row r = *row;
    const real* in = k.ws + (number > 0 ? row[-1].out : x) * n;
    const real *weights = k.w + start + r.params, *saved = k.ws + r.saved * n;
    real *parts = k.parts + start + r.params, *gy = k.ws + grad * n, *gx = k.ws + other * n;
    const bool moves = r.kind == CONV || r.kind == DEPTHWISE || r.kind == ATTEND;
    switch (r.kind) {
      case CONV:
        if (channel_block(r.channels) == 8)
          conv_weight_grad<8>(r, in, gy, parts, a.columns, n);
        else
          conv_weight_grad<4>(r, in, gy, parts, a.columns, n);
        conv_bias_grad(r, gy, parts, n);
        if (number == 0 && !needs_input_grad) break;
        if (channel_block(r.channels) == 8)
          conv_input_grad<8>(r, k.wt + r.transposed, gy, gx, n);
        else
          conv_input_grad<4>(r, k.wt + r.transposed, gy, gx, n);
        break;
      case DEPTHWISE: depthwise_backward(r, weights, parts, in, gy, gx, n); break;
      case NORM: norm_backward(r, weights, parts, saved, gy, k.scratch, n); break;
      case RELU: relu_backward(k.ws + r.out * n, gy, num_inputs(r) * n); break;
      case CODE: code_backward(r, parts, gy, n); break;
      case ATTEND: attend_backward(r, in, saved, gy, gx, k.ws + a.score_rows * n, n); break;
    }
    SYNC;
    if (moves) {
      const int taken = grad;
      grad = other;
      other = taken;
    }
  }
  return grad;
}

// The first row of the logits of a host from slot `first` on, the seed in slot `off` switched
// off. Where that is `first` itself, its segment has run already.
DEVICE int forward(const Args& a, const Work& k, int first, int off) {
  int x = 0;
  for (int s = first; s < a.num_slots; ++s) {
    x = s == off ? last_row(a, s).out : run_forward(a, k, s, k.w + a.host_starts[s], x);
    const int blueprint = active_blueprint(a, k, s), at = k.p * a.num_slots + s;
    if (blueprint < 0 || s == off) continue;
    const int program = a.seed_programs[s * a.num_blueprints + blueprint];
    const int seed = run_forward(a, k, program, k.w + a.part_starts[1 + s], x);
    const int size = num_outputs(last_row(a, s)) * a.n, y = a.slot_rows[2 * s + 1];
    blend_forward(k.ws + x * a.n, k.ws + seed * a.n, k.ws + y * a.n,
                  k.ws + a.slot_rows[2 * s] * a.n, size,
                  (k.shadow ? a.alpha_behind : a.alpha)[at], int(a.style[at]));
    SYNC;
    x = y;
  }
  return run_forward(a, k, a.num_slots, k.w + a.host_starts[a.num_slots], x);
}

// The rows that a slot hands on.
DEVICE int rows_after(const Args& a, const Work& k, int slot) {
  return active_blueprint(a, k, slot) >= 0 ? a.slot_rows[2 * slot + 1] : last_row(a, slot).out;
}

// From the gradient of the logits, in the first of the three tensors of gradients.
DEVICE void backward(const Args& a, const Work& k) {
  const int n = a.n, last = a.num_slots;
  int grad = a.grad_rows, other = grad + a.grad_size, third = other + a.grad_size;
  int through = run_backward(a, k, last, a.host_starts[last], rows_after(a, k, last - 1), grad,
                             other, true);
  other = through == grad ? other : grad;
  grad = through;
  for (int s = last - 1; s >= 0; --s) {
    const int blueprint = active_blueprint(a, k, s), at = k.p * a.num_slots + s;
    if (blueprint >= 0) {
      const int x = last_row(a, s).out, size = num_outputs(last_row(a, s)) * n;
      const int program = a.seed_programs[s * a.num_blueprints + blueprint];
      blend_backward(k.ws + x * n, k.ws + last_row(a, program).out * n,
                     k.ws + a.slot_rows[2 * s] * n, k.ws + grad * n, k.ws + other * n, size,
                     (k.shadow ? a.alpha_behind : a.alpha)[at], int(a.style[at]));
      SYNC;
      through = run_backward(a, k, program, a.part_starts[1 + s], x, other, third, true);
      add_rows(k.ws + grad * n, k.ws + through * n, size);
      SYNC;
    }
    through = run_backward(a, k, s, a.host_starts[s], s > 0 ? rows_after(a, k, s - 1) : 0, grad,
                           other, s > 0);
    other = through == grad ? other : grad;
    grad = through;
  }
}

// The examples `first` to `first + count - 1` of a minibatch at the beginning of the workspace,
// and zeros beyond.
DEVICE void load_examples(const Args& a, const Work& k, const long long* rows, int first, int count) {
  FOR_ALL(i, a.features * a.n) {
    const int f = i % a.features, b = i / a.features;
    real value = 0;
    if (b < count) value = a.inputs[(a.first_row[k.p] + rows[first + b]) * a.features + f];
    k.ws[f * a.n + b] = value;
  }
}

// Losses of examples into the scratch room, the gradients of their mean to the gradients' rows.
DEVICE void cross_entropy(const Args& a, const Work& k, const long long* rows, int first, int count,
                          int logits) {
  const int n = a.n;
  FOR_ALL(b, n) {
    const real* scores = k.ws + logits * n + b;
    real* grad = k.ws + a.grad_rows * n + b;
    real top = scores[0], total = 0;
    for (int c = 1; c < a.classes; ++c) top = scores[c * n] > top ? scores[c * n] : top;
    for (int c = 0; c < a.classes; ++c) total += exp(scores[c * n] - top);
    const int label = b < count ? int(a.labels[a.first_row[k.p] + rows[first + b]]) : 0;
    for (int c = 0; c < a.classes; ++c) {
      const real probability = exp(scores[c * n] - top) / total;
      grad[c * n] = b < count ? (probability - (c == label)) / a.batch : real(0);
    }
    k.scratch[LOSSES_AT + b] = b < count ? log(total) + top - scores[label * n] : real(0);
  }
}

// Adds the gradient of a minibatch's mean loss to `parts`, and the loss to `loss` if it is there.
DEVICE void gradients(const Args& a, const Work& k, const long long* rows, real* loss) {
  for (int first = 0; first < a.batch; first += a.n) {
    const int count = least(a.n, a.batch - first);
    load_examples(a, k, rows, first, count);
    SYNC;
    const int logits = forward(a, k, 0, NO_SLOT);
    cross_entropy(a, k, rows, first, count, logits);
    SYNC;
    if (loss)
      FOR_WARPS(only, 1) {
        const real total = warp_total(k.scratch + LOSSES_AT, a.n) / a.batch;
        if (LANE == 0) *loss = first == 0 ? total : *loss + total;
      }
    backward(a, k);
  }
}

// All columns of a part of the host: itself, or the seed in slot `part - 1`, if there is one.
DEVICE int part_size(const Args& a, const Work& k, int part) {
  if (part == 0) return a.part_starts[1];
  const int blueprint = a.blueprint[k.p * a.num_slots + part - 1];
  return blueprint < 0 ? 0 : a.seed_sizes[(part - 1) * a.num_blueprints + blueprint];
}

// Of the shadow pass's gradients, only those of the seeds behind the host remain.
DEVICE void keep_behind(const Args& a, const Work& k) {
  for (int part = 0; part <= a.num_slots; ++part) {
    if (part > 0 && a.behind[k.p * a.num_slots + part - 1]) continue;
    const int size = part_size(a, k, part);
    FOR_ALL(i, NUM_PARTS * size)
      k.parts[i / size * a.columns + a.part_starts[part] + i % size] = 0;
  }
}

// The host and each of its seeds take a step; `parts` is left at zero.
DEVICE void update(const Args& a, const Work& k, bool keeps_grads) {
  const long long at = (long long)k.p * a.columns, table = (long long)(a.num_hosts + 1) * a.columns;
  const real rate = a.rates[k.p];
  for (int part = 0; part <= a.num_slots; ++part) {
    const int start = a.part_starts[part], size = part_size(a, k, part);
    if (size == 0) continue;
    const double step = a.steps[k.p * (a.num_slots + 1) + part] + 1;
    const real scale = real(rate / (1 - pow(a.beta_mean, step)));
    const real inverse = real(1 / sqrt(1 - pow(a.beta_square, step)));
    const real decay = real(a.weight_decay), beta = real(a.beta_mean), keep = real(a.beta_square);
    const real fresh = real(1 - a.beta_mean), fresh_square = real(1 - a.beta_square);
    FOR_ALL(i, size) {
      real g = 0;
      for (int split = 0; split < NUM_PARTS; ++split) {
        g += k.parts[split * a.columns + start + i];
        k.parts[split * a.columns + start + i] = 0;
      }
      real *w = a.params + at + start + i, *mean = a.moments + at + start + i;
      if (keeps_grads) a.grads[at + start + i] = g;
      if (a.is_adamw) {
        real* square = mean + table;
        *mean += fresh * (g - *mean);
        *square = keep * *square + fresh_square * g * g;
        *w = (1 - rate * decay) * *w - scale * *mean / (sqrt(*square) * inverse + real(a.epsilon));
      } else {
        *mean = beta * *mean + g + decay * *w;
        *w -= rate * *mean;
      }
    }
  }
  SYNC;
  FOR_ALL(part, a.num_slots + 1)
    if (part_size(a, k, part)) a.steps[k.p * (a.num_slots + 1) + part] += 1;
}

// The transposed weights of a host and all its seeds.
DEVICE void transpose_all(const Args& a, const Work& k) {
  for (int number = 0; number <= 2 * a.num_slots; ++number) {
    int program = number, start;
    if (number <= a.num_slots) {
      start = a.host_starts[number];
    } else {
      const int slot = number - a.num_slots - 1, blueprint = a.blueprint[k.p * a.num_slots + slot];
      if (blueprint < 0) continue;
      program = a.seed_programs[slot * a.num_blueprints + blueprint];
      start = a.part_starts[1 + slot];
    }
    for (int layer = 0; layer < a.lengths[program]; ++layer) {
      const Row r = a.programs[program * a.longest + layer];
      if (r.kind == CONV) transpose(r, k.w + start + r.params, k.wt + r.transposed);
    }
  }
}

KERNEL train(CONSTANT Args a) {
  SHARED;
  Work k = work_of(a, reinterpret_cast<real*>(shared_memory));
  for (k.p = BLOCK; k.p < a.num_hosts; k.p += NUM_BLOCKS) {
    k.w = a.params + (long long)k.p * a.columns;
    bool any_behind = false;
    for (int s = 0; s < a.num_slots; ++s) any_behind |= a.behind[k.p * a.num_slots + s] != 0;
    FOR_ALL(i, NUM_PARTS * a.columns) k.parts[i] = 0;
    for (int step = 0; step < a.minibatches; ++step) {
      const long long at = (long long)step * a.num_hosts + k.p;
      transpose_all(a, k);
      if (any_behind) {
        k.shadow = true;
        gradients(a, k, a.batch_rows + at * a.batch, nullptr);
        keep_behind(a, k);
        SYNC;
      }
      k.shadow = false;
      gradients(a, k, a.batch_rows + at * a.batch, a.losses + at);
      update(a, k, step == a.minibatches - 1);
      SYNC;
    }
  }
}

DEVICE void copy_logits(const Args& a, const Work& k, int logits, int copy, int first, int count) {
  const int copies = 1 + a.num_ablated;
  FOR_ALL(i, a.classes * a.n) {
    const int c = i / a.n, b = i % a.n;
    if (b >= count) continue;
    real* out = a.logits + ((long long)(k.p * a.classes + c) * copies) * a.rows + first + b;
    // a slot without a seed changes nothing: what this thread wrote with all seeds on
    out[(long long)copy * a.rows] = logits < 0 ? out[0] : k.ws[(logits + c) * a.n + b];
  }
}

// Copy 0 has all seeds on; copy 1 + k has those in slot `ablated[k]` off.
KERNEL logits(CONSTANT Args a) {
  SHARED;
  Work k = work_of(a, reinterpret_cast<real*>(shared_memory));
  k.shadow = false;
  const int chunks = ceil_div(a.rows, a.n);
  for (int task = BLOCK; task < a.num_hosts * chunks; task += NUM_BLOCKS) {
    k.p = task / chunks;
    k.w = a.params + (long long)k.p * a.columns;
    const int first = task % chunks * a.n, count = least(a.n, a.rows - first);
    transpose_all(a, k);
    FOR_ALL(i, a.features * a.n) {
      const int f = i / a.n, b = i % a.n;
      const long long at = ((long long)k.p * a.features + f) * a.rows + first + b;
      k.ws[i] = b < count ? a.inputs[at] : real(0);
    }
    SYNC;
    copy_logits(a, k, forward(a, k, 0, NO_SLOT), 0, first, count);
    SYNC;
    // from the last slot on: a pass overwrites what comes after its slot, not before
    for (int number = a.num_ablated - 1; number >= 0; --number) {
      const int slot = a.ablated[number];
      const bool felt = active_blueprint(a, k, slot) >= 0;
      copy_logits(a, k, felt ? forward(a, k, slot, slot) : -1, 1 + number, first, count);
      SYNC;
    }
  }
}
