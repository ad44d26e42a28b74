// Whole hosts with their seeds, a block each: logits, and training minibatch by minibatch.
//
// Hosts do not depend on one another, so a block takes its host through all its minibatches
// before the next one. What a host runs, and where its activations lie, is read from tables that
// are the same for all hosts of a population (see `Plan` in fused.py).
//
// Parity test: tests/tolaria/test_fused.py.

// Field by field what `fused.Arguments` is.
struct Args {
  // tables
  const Row* programs;       // [programs, longest]: segments, head, then seeds
  const int* lengths;        // [programs]
  const int* widens;         // [programs]: reads before its segment, added behind the next layer
  const int* host_starts;    // [S + 1]: where the parameters of segments and head begin
  const int* seed_programs;  // [S, B]
  const int* seed_sizes;     // [S, B]
  const int* part_starts;    // [S + 2]: columns where host, seeds and the row itself begin and end
  const int* homes;          // where a part's parameters lie in the transposed weights, or -1
  const int* home_starts;    // [S, B]: where those of a seed begin; the host's are first
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
  // sizes
  int longest, num_hosts, num_slots, num_blueprints, columns, features, classes, host_size;
  int minibatches, batch, rows, num_ablated;
  int n;          // examples worked on at a time, a multiple of 4
  int room;       // reals of a block's workspace
  int grad_rows;  // where the first of three tensors of gradients begins
  int grad_size;  // rows of each
  int score_rows;
  int transposed_at;  // reals into shared memory or the workspace, and so is the next
  int parts_at;
  int parts_in_shared;
  int transposed_size;
};

// What a block works with.
struct Work {
  real *ws, *scratch, *wt, *parts;
  const real* w;
  int p;
  bool shadow;  // seeds behind the host are switched on
};

const int NO_SLOT = -1;
const int NOWHERE = -1, NOT_WANTED = -2;  // instead of rows that a gradient is added to
const int LOSSES_AT = 8 * THREADS;  // in the scratch room, behind what norms use

DEVICE Work work_of(const Args& a) {
  real* const shared = reinterpret_cast<real*>(shared_memory);
  Work k;
  k.ws = a.workspace + (long long)BLOCK * a.room;
  k.scratch = shared;
  k.wt = WEIGHTS_IN_SHARED ? shared + a.transposed_at : k.ws + a.transposed_at;
  k.parts = a.parts_in_shared ? shared + a.parts_at : k.ws + a.parts_at;
  return k;
}

// The program of the seed in a slot that takes part in this pass, or -1.
DEVICE int active_seed(const Args& a, const Work& k, int slot) {
  const int at = k.p * a.num_slots + slot;
  if (a.blueprint[at] < 0 || (!k.shadow && a.behind[at])) return -1;
  return a.seed_programs[slot * a.num_blueprints + a.blueprint[at]];
}

DEVICE const Row& last_row(const Args& a, int program) {
  return a.programs[program * a.longest + a.lengths[program] - 1];
}

// The output's first row of a program with parameters at `w`, on the rows that begin at `x`. If
// `added` are rows, they are added to the first layer's output, times `alpha`.
DEVICE int run_forward(const Args& a, const Work& k, int program, const real* w, int x, int added,
                       real alpha) {
  const int n = a.n;
  for (int number = 0; number < a.lengths[program]; ++number) {
    const Row& r = a.programs[program * a.longest + number];
    const real *in = k.ws + x * n, *weights = w + r.params;
    real *out = k.ws + r.out * n, *saved = k.ws + r.saved * n;
    const bool widened = number == 0 && added >= 0;  // a convolution
    switch (r.kind) {
      case CONV:
        conv_forward(r, weights, k.wt + r.transposed, in, out, r.rectifies && !widened, n);
        break;
      case DEPTHWISE:
        depthwise(r, weights, weights + r.channels * num_taps(r), in, out, 1, n);
        break;
      case NORM: norm_forward(r, weights, in, out, saved, k.scratch, n); break;
      case RELU: relu_forward(in, out, num_inputs(r) * n); break;
      case CODE: code_forward(r, weights, in, out, n); break;
      case ATTEND: attend_forward(r, in, out, saved, n); break;
    }
    SYNC;
    if (widened) {
      widen_rows(out, k.ws + added * n, num_outputs(r) * n, alpha, r.rectifies);
      SYNC;
    }
    x = r.out;
  }
  return x;
}

// Adds the gradients of a program's parameters to `parts`. Of the two tensors of gradients,
// `grad` holds that of the output; the one that is returned holds that of the input. Where the
// input is a rectifier's output, it is the gradient of what went into that. If `onto` are rows,
// the input's gradient is added to what is there; NOT_WANTED: a convolution need not make it.
// `first` becomes the tensor that holds the gradient of the first layer's output.
DEVICE int run_backward(const Args& a, const Work& k, int program, int start, int x, int grad,
                        int other, int onto, bool rectified, int& first) {
  const int n = a.n;
  for (int number = a.lengths[program] - 1; number >= 0; --number) {
    const Row& r = a.programs[program * a.longest + number];
    const Row& before = number > 0 ? a.programs[program * a.longest + number - 1] : r;
    const real* in = k.ws + (number > 0 ? before.out : x) * n;
    const real *weights = k.w + start + r.params, *saved = k.ws + r.saved * n;
    const real* mask = (number > 0 ? before.rectifies : rectified) ? in : nullptr;
    const bool ends_here = number == 0 && onto >= 0 && r.kind == CONV;
    first = grad;
    if (ends_here) other = onto;
    real *parts = k.parts + start + r.params, *gy = k.ws + grad * n, *gx = k.ws + other * n;
    const bool moves = r.kind == CONV || r.kind == DEPTHWISE || r.kind == ATTEND;
    switch (r.kind) {
      case CONV:
        conv_weight_grad(r, in, gy, parts, a.columns, n);
        conv_bias_grad(r, gy, parts, n);
        if (number == 0 && onto == NOT_WANTED) break;
        conv_input_grad(r, k.wt + r.transposed, gy, gx, ends_here, mask, n);
        break;
      case DEPTHWISE:
        depthwise(r, weights, nullptr, gy, gx, -1, n);
        depthwise_weight_grad(r, parts, in, gy, n);
        break;
      case NORM: norm_backward(r, weights, parts, saved, gy, k.scratch, n); break;
      case RELU: relu_backward(k.ws + r.out * n, gy, num_inputs(r) * n); break;
      case CODE: code_backward(r, parts, gy, n); break;
      case ATTEND: attend_backward(r, in, saved, gy, gx, k.ws + a.score_rows * n, n); break;
    }
    SYNC;
    if (ends_here) return onto;
    if (moves) {
      const int taken = grad;
      grad = other;
      other = taken;
    }
    if (number == 0 && onto >= 0) {
      add_rows(k.ws + onto * n, k.ws + grad * n, mask, num_inputs(r) * n);
      SYNC;
      return onto;
    }
    if (mask && r.kind != CONV) {
      relu_backward(mask, k.ws + grad * n, num_inputs(r) * n);
      SYNC;
    }
  }
  return grad;
}

// A host is run in stages: its segments, each with the seed in the slot behind it, and its head.
struct Stage {
  int slot;  // for the head, the number of slots
  bool is_seed;
  int program;  // -1: no seed takes part
  bool widens;
  int start;  // of its parameters
  real alpha;
  int style;
};

DEVICE Stage stage_of(const Args& a, const Work& k, int number) {
  Stage stage;
  stage.slot = number / 2;
  stage.is_seed = number % 2;
  stage.program = stage.slot;
  stage.start = a.host_starts[stage.slot];
  if (stage.is_seed) {
    const int at = k.p * a.num_slots + stage.slot;
    stage.program = active_seed(a, k, stage.slot);
    stage.start = a.part_starts[1 + stage.slot];
    stage.alpha = (k.shadow ? a.alpha_behind : a.alpha)[at];
    stage.style = int(a.style[at]);
  }
  stage.widens = stage.program >= 0 && a.widens[stage.program];
  return stage;
}

// Where the input of a segment or the head begins, and whether it is a rectifier's output.
struct Input {
  int x;
  bool rectified;
};

DEVICE Input input_of(const Args& a, const Work& k, int slot) {
  if (slot == 0) return Input{0, false};
  const int seed = active_seed(a, k, slot - 1);
  if (seed >= 0 && !a.widens[seed]) return Input{a.slot_rows[2 * slot - 1], false};
  const Row& last = last_row(a, slot - 1);
  return Input{last.out, last.rectifies != 0};
}

// The first row of the logits of a host from slot `first` on, the seed in slot `off` switched
// off. Where that is `first` itself, its segment has run already.
DEVICE int forward(const Args& a, const Work& k, int first, int off) {
  const int n = a.n;
  int x = 0, before = 0, added = NOWHERE;  // `before` is the input of the slot's segment
  real alpha = 0;
  for (int number = 2 * first + (first == off); number <= 2 * a.num_slots; ++number) {
    const Stage stage = stage_of(a, k, number);
    if (stage.is_seed) x = last_row(a, stage.slot).out;
    if (stage.is_seed && (stage.program < 0 || stage.slot == off)) continue;
    const int y = run_forward(a, k, stage.program, k.w + stage.start, stage.widens ? before : x,
                              stage.is_seed ? NOWHERE : added, alpha);
    if (stage.widens) {
      added = y;
      alpha = stage.alpha;
    } else if (stage.is_seed) {
      const int kept = a.slot_rows[2 * stage.slot], blended = a.slot_rows[2 * stage.slot + 1];
      blend_forward(k.ws + x * n, k.ws + y * n, k.ws + blended * n, k.ws + kept * n,
                    num_outputs(last_row(a, stage.slot)) * n, stage.alpha, stage.style);
      SYNC;
      x = blended;
    } else {
      before = x;
      x = y;
      added = NOWHERE;
    }
  }
  return x;
}

// From the gradient of the logits, in the first of the three tensors of gradients.
//
// A seed that widens comes before its segment here: it starts from the gradient of the next layer's
// output, which is still there, and the segment adds to what the seed makes of it.
DEVICE void backward(const Args& a, const Work& k) {
  const int n = a.n;
  int grad = a.grad_rows, other = grad + a.grad_size, third = other + a.grad_size;
  const int all = grad + other + third;
  int first = NOWHERE, widened = NOWHERE;
  for (int number = 2 * a.num_slots; number >= 0; --number) {
    const Stage stage = stage_of(a, k, number);
    if (stage.program < 0) continue;
    const Input input = input_of(a, k, stage.slot);
    int x = input.x, from = grad, free = other, onto = stage.slot > 0 ? widened : NOT_WANTED;
    bool rectified = input.rectified;
    if (stage.widens) {
      from = first, free = all - grad - first, rectified = false;
      onto = stage.slot > 0 ? NOWHERE : NOT_WANTED;
      scale_rows(k.ws + from * n, num_outputs(last_row(a, stage.program)) * n, stage.alpha);
      SYNC;
    } else if (stage.is_seed) {
      const Row& last = last_row(a, stage.slot);
      x = last.out, rectified = last.rectifies, from = other, free = third, onto = grad;
      blend_backward(k.ws + x * n, k.ws + last_row(a, stage.program).out * n,
                     k.ws + a.slot_rows[2 * stage.slot] * n, k.ws + grad * n, k.ws + from * n,
                     num_outputs(last) * n, stage.alpha, stage.style);
      SYNC;
    }
    int start = NOWHERE;
    const int through =
        run_backward(a, k, stage.program, stage.start, x, from, free, onto, rectified, start);
    if (stage.widens) {
      widened = through;
      other = all - grad - through;
    } else if (!stage.is_seed) {
      other = start != through ? start : through == grad ? other : grad;
      grad = through;
      first = start;
      widened = NOWHERE;
    }
    third = all - grad - other;
  }
}

// The examples `first` to `first + count - 1` of a minibatch at the beginning of the workspace,
// and zeros beyond.
DEVICE void load_examples(const Args& a, const Work& k, const long long* rows, int first,
                          int count) {
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

// How many columns are used of a part of the host: itself, or the seed in slot `part - 1`.
DEVICE int part_size(const Args& a, const Work& k, int part) {
  if (part == 0) return a.host_size;
  const int blueprint = a.blueprint[k.p * a.num_slots + part - 1];
  return blueprint < 0 ? 0 : a.seed_sizes[(part - 1) * a.num_blueprints + blueprint];
}

// Where the homes of a part's parameters begin.
DEVICE int home_start(const Args& a, const Work& k, int part) {
  if (part == 0) return 0;
  const int blueprint = a.blueprint[k.p * a.num_slots + part - 1];
  return blueprint < 0 ? 0 : a.home_starts[(part - 1) * a.num_blueprints + blueprint];
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
  const long long at = (long long)k.p * a.columns, table = (long long)a.num_hosts * a.columns;
  const real rate = a.rates[k.p], decay = real(a.weight_decay), epsilon = real(a.epsilon);
  const real keep = real(a.beta_square);
  const real fresh = real(1 - a.beta_mean), fresh_square = real(1 - a.beta_square);
  FOR_ALL(part, a.num_slots + 1) {
    real* steps = a.steps + k.p * (a.num_slots + 1) + part;
    if (part_size(a, k, part)) *steps += 1;
    k.scratch[2 * part] = real(rate / (1 - pow(a.beta_mean, double(*steps))));
    k.scratch[2 * part + 1] = real(1 / sqrt(1 - pow(a.beta_square, double(*steps))));
  }
  SYNC;
  for (int part = 0; part <= a.num_slots; ++part) {
    const int start = a.part_starts[part], size = part_size(a, k, part);
    const int* homes = a.homes + home_start(a, k, part);
    const real scale = k.scratch[2 * part], inverse = k.scratch[2 * part + 1];
    for (int first = THREAD; first < size; first += 4 * STRIDE) {
      real w[4], mean[4], square[4];
      int home[4];
#pragma unroll
      for (int u = 0; u < 4; ++u) {  // loads side by side
        const int i = least(first + u * STRIDE, size - 1);
        w[u] = a.params[at + start + i];
        mean[u] = a.moments[at + start + i];
        square[u] = a.moments[table + at + start + i];
        home[u] = homes[i];
      }
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const int i = first + u * STRIDE;
        if (i >= size) continue;
        real g = 0;
#pragma unroll
        for (int split = 0; split < NUM_PARTS; ++split) {
          g += k.parts[split * a.columns + start + i];
          k.parts[split * a.columns + start + i] = 0;
        }
        if (keeps_grads) a.grads[at + start + i] = g;
        mean[u] += fresh * (g - mean[u]);
        square[u] = keep * square[u] + fresh_square * g * g;
        a.moments[table + at + start + i] = square[u];
        w[u] *= 1 - rate * decay;
        w[u] -= scale * mean[u] / (sqrt(square[u]) * inverse + epsilon);
        a.moments[at + start + i] = mean[u];
        a.params[at + start + i] = w[u];
        if (home[u] >= 0) k.wt[home[u]] = w[u];
      }
    }
  }
}

// The weights of convolutions with output channels last, padded with zeros.
DEVICE void transpose(const Args& a, const Work& k) {
  FOR_ALL(i, a.transposed_size) k.wt[i] = 0;
  SYNC;
  for (int part = 0; part <= a.num_slots; ++part) {
    const int* homes = a.homes + home_start(a, k, part);
    FOR_ALL(i, part_size(a, k, part))
      if (homes[i] >= 0) k.wt[homes[i]] = k.w[a.part_starts[part] + i];
  }
}

KERNEL train(CONSTANT Args a) {
  Work k = work_of(a);
  for (k.p = BLOCK; k.p < a.num_hosts; k.p += NUM_BLOCKS) {
    k.w = a.params + (long long)k.p * a.columns;
    bool any_behind = false;
    for (int s = 0; s < a.num_slots; ++s) any_behind |= a.behind[k.p * a.num_slots + s] != 0;
    FOR_ALL(i, NUM_PARTS * a.columns) k.parts[i] = 0;
    transpose(a, k);
    SYNC;
    for (int step = 0; step < a.minibatches; ++step) {
      const long long at = (long long)step * a.num_hosts + k.p;
      for (int pass = any_behind ? 0 : 1; pass < 2; ++pass) {
        k.shadow = pass == 0;
        gradients(a, k, a.batch_rows + at * a.batch, k.shadow ? nullptr : a.losses + at);
        if (k.shadow) {
          keep_behind(a, k);
          SYNC;
        }
      }
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
  Work k = work_of(a);
  k.shadow = false;
  const int chunks = ceil_div(a.rows, a.n);
  for (int task = BLOCK; task < a.num_hosts * chunks; task += NUM_BLOCKS) {
    k.p = task / chunks;
    k.w = a.params + (long long)k.p * a.columns;
    const int first = task % chunks * a.n, count = least(a.n, a.rows - first);
    transpose(a, k);
    FOR_ALL(i, a.features * a.n) {
      const int f = i / a.n, b = i % a.n;
      const long long at = ((long long)k.p * a.features + f) * a.rows + first + b;
      k.ws[i] = b < count ? a.inputs[at] : real(0);
    }
    SYNC;
    // all seeds on, then the last slot's off, and so on: a pass overwrites what comes after its
    // slot, not before
    for (int copy = a.num_ablated + 1; copy > 0; --copy) {
      const bool whole = copy > a.num_ablated;
      const int slot = whole ? NO_SLOT : a.ablated[copy - 1];
      int found = NOWHERE;
      if (whole || active_seed(a, k, slot) >= 0) found = forward(a, k, most(slot, 0), slot);
      copy_logits(a, k, found, whole ? 0 : copy, first, count);
      SYNC;
    }
  }
}
