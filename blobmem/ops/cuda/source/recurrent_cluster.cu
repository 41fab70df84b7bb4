#include "common.cuh"
#include "cluster.cuh"
#include "recurrent.cuh"

// A run of an LSTM's steps in one launch. A cluster has a few streams to itself, and each of its blocks some units, a
// multiple of four, of which it holds the weights of the state in registers, zeros where there are none; what the others
// need of a step goes through shared memory. Arrays are those of recurrent.cu; w is (4, units, units).
enum { STREAMS = 4, UNITS = 256, OWN = UNITS / RANKS, THREADS = 512 };

__device__ __forceinline__ int units_of_block(i64 units) { return (int)(units + 4 * RANKS - 1) / (4 * RANKS) * 4; }

// Of 2 W numbers, the sums of W over this lane and the one across `bit`: the first ones where that bit of the lane is 0.
template <int W> __device__ __forceinline__ void fold(T *v, int lane, int bit) {
  bool second = lane & bit;
#pragma unroll
  for (int i = 0; i < W; i++) {
    T other = __shfl_xor_sync(0xffffffffu, second ? v[i] : v[i + W], bit);
    v[i] = (second ? v[i + W] : v[i]) + other;
  }
}

// Shared memory is written by turns: what is written in a step has been read when the next one's is there. (A block sends of
// a step when all its warps have read what came before, and others go on only with what it sent.)

// The streams' states; those of the block's units, to be sent.
struct __align__(16) Forward {
  T state[2][STREAMS][UNITS], own[2][STREAMS][OWN];
  Post posts[2];
};

// `count` steps from `first` on, of which gates and hidden are; `state` is what the first multiplies, and becomes what the
// next run's first does; after moves on by after_step, or is one cell with 0. A cluster has `each` streams.
//
// Sixteen lanes have a unit: its four gates' sums over 16 units of the state each, and then, of up to four streams, one gate
// each.
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS) lstm_steps(D *gates, const D *w, const D *b, const D *fixed, const D *before, D *after, i64 after_step, D *hidden, D *state, const D *cont, i64 first, i64 count, i64 steps, i64 streams, i64 units, i64 each) {
#ifdef CLUSTERS
  __shared__ Forward copies[COPIES];
  Forward &block = own_copy(copies);
  i64 start = blockIdx.x / RANKS * each;
  int some = (int)min(each, streams - start), own = units_of_block(units), place = rank_of_block() * own;
  int lane = threadIdx.x & 15, local = threadIdx.x >> 4, s = lane >> 2, gate = lane & 3;
  i64 n = start + s, u = place + local, at = n * units + u, at_gate = (n * 4 + gate) * units + u;
  bool has_unit = local < own && u < units, here = has_unit && s < some;

  T weights[4][16];
#pragma unroll
  for (int q = 0; q < 4; q++)
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int k = i / 4 * 64 + lane * 4 + i % 4;
      weights[q][i] = has_unit && k < units ? (T)w[(q * units + u) * units + k] : (T)0;
    }
  for (int i = threadIdx.x; i < STREAMS * UNITS; i += blockDim.x) {
    int stream = i / UNITS, k = i % UNITS;
    block.state[0][stream][k] = stream < some && k < units ? (T)state[(start + stream) * units + k] : (T)0;
    block.state[1][stream][k] = 0;
  }
  // which four units of which stream this thread sends to the block of its warp's number
  int to = threadIdx.x >> 5, sent = threadIdx.x >> 3 & 3, four = (threadIdx.x & 7) * 4;
  bool sends = to < RANKS && sent < some && four < own;
  Forward &there = copy_of(copies, to % RANKS);
  T bias = here ? fixed ? b[gate * units + u] + fixed[at_gate] : (T)b[gate * units + u] : (T)0;
  T cell = here ? (T)before[at] : (T)0, sum = here ? (T)gates[at_gate] : (T)0;
  T keep = here ? (T)cont[first * streams + n] : (T)0, later = here ? keep_after(cont, first, steps, streams, n) : (T)0;
  int bytes = some * own * RANKS * (int)sizeof(T);
  if (threadIdx.x < 2) open(block.posts[threadIdx.x]);
  cluster_barrier();

  for (int i = 0; i < count; i++) {
    int turn = i & 1;
    bool last = i + 1 == count;
    if (i) await(block.posts[turn], (i - 1) / 2);
    T v[16] = {};
#pragma unroll
    for (int q = 0; q < STREAMS; q++)
      if (q < some)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          Lot<4> x = *(Lot<4> *)&block.state[turn][q][j * 64 + lane * 4];
#pragma unroll
          for (int e = 0; e < 4; e++)
#pragma unroll
            for (int p = 0; p < 4; p++) v[4 * q + p] += weights[p][4 * j + e] * x.at[e];
        }
    fold<8>(v, lane, 8);
    fold<4>(v, lane, 4);
    fold<2>(v, lane, 2);
    fold<1>(v, lane, 1);
    T x = v[0] + (sum + bias), t = tanh(gate == 3 ? x : (T)0.5 * x), open = gate == 3 ? t : (T)0.5 + (T)0.5 * t;
    int quad = threadIdx.x & 28;
    T in = __shfl_sync(0xffffffffu, open, quad), forget = __shfl_sync(0xffffffffu, open, quad + 1);
    T out = __shfl_sync(0xffffffffu, open, quad + 2), candidate = __shfl_sync(0xffffffffu, open, quad + 3);
    cell = as_held(keep * forget * cell + in * candidate);
    T h = out * tanh(cell), next = as_held(later * h);
    if (!last) {
      if (gate == 0 && local < own) block.own[turn][s][local] = next;
      __syncthreads();
      if (threadIdx.x == 0) expect(block.posts[1 - turn], bytes);
      if (sends)
        send(*(Lot<4> *)&block.own[turn][sent][four], &there.state[1 - turn][sent][place + four], there.posts[1 - turn]);
    }
    // what nobody waits for, while it is on its way
    if (here) {
      gates[at_gate] = open;
      if (gate == 0) hidden[at] = h;
      if (gate == 1) after[at] = cell;
      if (gate == 2 && last) state[at] = next;
      gates += 4 * streams * units;
      hidden += streams * units;
      after += after_step;
      if (!last) {
        sum = gates[at_gate];
        keep = later;
        later = keep_after(cont, first + i + 1, steps, streams, n);
      }
    }
  }
#endif
}

// Of the block's units: the gradients of their gates' sums; the parts that each block has in the gradients that are handed
// back.
struct __align__(16) Backward {
  T dgates[2][STREAMS][OWN * 4], parts[2][RANKS][STREAMS][OWN];
  Post posts[2];
};

// `count` steps, the last one first, down to `first`, of which dgates are; gates, cells and dhidden are of all steps, the
// others as in lstm_step_gradient: dnext and dafter of the run's last step, dbefore of its first.
//
// Eight lanes have four columns of w, each of them the rows of four of the block's units. A warp has a stream of the
// block's units between products.
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS) lstm_steps_gradient(const D *gates, const D *w, const D *cells, const D *dhidden, const D *dnext, const D *dafter, D *dbefore, D *dgates, const D *cont, i64 first, i64 count, i64 steps, i64 streams, i64 units, i64 each) {
#ifdef CLUSTERS
  __shared__ Backward copies[COPIES];
  Backward &block = own_copy(copies);
  i64 start = blockIdx.x / RANKS * each;
  int some = (int)min(each, streams - start), own = units_of_block(units), rank = rank_of_block(), place = rank * own;

  int lane = threadIdx.x & 7, column = threadIdx.x >> 3 << 2;
  T weights[16][4];
#pragma unroll
  for (int i = 0; i < 16; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) {
      int unit = i / 4 * 8 + lane;
      bool is = unit < own && place + unit < units && column + c < units;
      weights[i][c] = is ? (T)w[(i % 4 * units + place + unit) * units + column + c] : (T)0;
    }
  int sent = lane >> 1, owner = column / own;
  bool sends = owner < RANKS && sent < some;
  Backward &there = copy_of(copies, owner % RANKS);
  int target = column - owner * own + (lane & 1) * 2;

  int s = threadIdx.x >> 5, local = threadIdx.x & 31;
  i64 n = start + s, u = place + local, at = n * units + u, at_gate = 4 * n * units + u, cell_step = streams * units;
  bool here = s < some && local < own && u < units;
  for (int i = threadIdx.x; i < 2 * STREAMS * OWN * 4; i += blockDim.x) block.dgates[0][0][i] = 0;
  i64 step = first + count - 1;
  gates += step * 4 * cell_step;
  cells += step * cell_step;
  dhidden += step * cell_step;
  dgates += (count - 1) * 4 * cell_step;
  T cell = 0, cell_before = 0, dcell = 0, dh = 0, keep = 0, keep_later = 0;
  Gates opened = {};
  if (here) {
    opened = load_gates(gates + at_gate, units);
    cell = cells[cell_step + at];
    cell_before = cells[at];
    dcell = dafter ? (T)dafter[at] : (T)0;
    dh = dhidden[at];
    if (dnext) dh += keep_after(cont, step, steps, streams, n) * dnext[at];
    keep = cont[step * streams + n];
  }
  int bytes = some * own * RANKS * (int)sizeof(T);
  if (threadIdx.x < 2) open(block.posts[threadIdx.x]);
  cluster_barrier();

  for (int i = 0; i < count; i++) {
    int turn = i & 1;
    bool last = i + 1 == count;
    Gates gradient;
    if (i) await(block.posts[turn], (i - 1) / 2);
    if (here) {
      if (i) {
        T handed = 0;
#pragma unroll
        for (int r = 0; r < RANKS; r++) handed += block.parts[turn][r][s][local];
        dh += keep_later * handed;
      }
      gradient = gates_gradient(opened, keep, cell_before, cell, dcell, dh, &dcell);
      gradient = Gates{as_held(gradient.i), as_held(gradient.f), as_held(gradient.o), as_held(gradient.g)};
      *(Lot<4> *)&block.dgates[turn][s][4 * local] = Lot<4>{gradient.i, gradient.f, gradient.o, gradient.g};
    }
    if (!last) {
      __syncthreads();
      T v[16] = {};
#pragma unroll
      for (int q = 0; q < STREAMS; q++)
        if (q < some)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            Lot<4> x = *(Lot<4> *)&block.dgates[turn][q][(j * 8 + lane) * 4];
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
              for (int c = 0; c < 4; c++) v[4 * q + c] += weights[4 * j + e][c] * x.at[e];
          }
      fold<8>(v, lane, 4);
      fold<4>(v, lane, 2);
      fold<2>(v, lane, 1);
      if (threadIdx.x == 0) expect(block.posts[1 - turn], bytes);
      if (sends) send(Lot<2>{v[0], v[1]}, &there.parts[1 - turn][rank][sent][target], there.posts[1 - turn]);
    }
    // what nobody waits for, while it is on its way
    if (here) {
      store_gates(gradient, dgates + at_gate, units);
      if (last) dbefore[at] = dcell;
      else {
        gates -= 4 * cell_step;
        dgates -= 4 * cell_step;
        cells -= cell_step;
        dhidden -= cell_step;
        step--;
        opened = load_gates(gates + at_gate, units);
        cell = cell_before;
        cell_before = cells[at];
        dh = dhidden[at];
        keep_later = keep;
        keep = cont[step * streams + n];
      }
    }
  }
#endif
}
