constexpr int WPB = BT * K / TRELLIS_WORD_BITS;
constexpr int BLOCKS = C / BT;
constexpr int SIDE = INTERLEAVE ? INTERLEAVE : BLOCKS;
constexpr int PER_GROUP = TRELLIS_LANES / WPB;
constexpr int GROUPS = (BLOCKS + PER_GROUP - 1) / PER_GROUP;
constexpr int ROWS = M > 1 && VARIANT >= TRELLIS_SHARED_SCATTER ? M : 1;
constexpr int SPAN = (R + SPLITS - 1) / SPLITS;

// Exact values in the table variant, unrefined ones for the float codebook.
threadgroup float table[VARIANT == TRELLIS_LOCAL_TABLE || FLOAT_CODEBOOK ? 1 << L : 1];
if (VARIANT == TRELLIS_LOCAL_TABLE || FLOAT_CODEBOOK) {
  for (uint s = thread_index_in_threadgroup; s < 1u << L; s += THREADS) {
    table[s] = FLOAT_CODEBOOK ? trellis_unrefined(trellis_float_y<BITS_Y>(s)) : lut[s];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

const uint lane = thread_index_in_simdgroup;
const uint group = threadgroup_position_in_grid.y * SG_TG + simdgroup_index_in_threadgroup;
const uint split = threadgroup_position_in_grid.z % SPLITS;
const uint sample = threadgroup_position_in_grid.z / SPLITS;
const uint word = lane % WPB;
const uint block = group * PER_GROUP + lane / WPB;
// Idle lanes read nothing and name themselves in the shuffle.
const bool active = lane < PER_GROUP * WPB && block < BLOCKS;
const ushort next = active && word + 1 == WPB ? lane - word : active ? lane + 1 : lane;
// Where in the lane's word its first window starts.
const uint start = (K - word * TRELLIS_WORD_BITS % K) % K;

float sums[ROWS][NP];
TRELLIS_UNROLL
for (int m = 0; m < ROWS; m++) {
  TRELLIS_UNROLL
  for (int j = 0; j < NP; j++) {
    sums[m][j] = 0;
  }
}

const uint first = split * SPAN;
const uint last = group < GROUPS ? min(first + SPAN, uint(R)) : first;
for (uint r = first; r < last; r++) {
  const uint low = active ? codes[trellis_block<SIDE, WPB>(R, r, block) + word] : 0;
  const uint2 ring = trellis_ring(low, simd_shuffle(low, next), start);
  const float scale = float(scales[r]);
  float xs[ROWS];
  TRELLIS_UNROLL
  for (int m = 0; m < ROWS; m++) {
    xs[m] = float(x[ulong(sample + m) * R + r]);
  }
  TRELLIS_UNROLL
  for (int j = 0; j < NP; j++) {
    const uint state = trellis_window<L>(ring, j * K);
    const float value = VARIANT == TRELLIS_LOCAL_TABLE || FLOAT_CODEBOOK ? table[state]
        : VARIANT == TRELLIS_DEVICE_TABLE                                ? lut[state]
                                                                         : trellis_value<VARIANT, BITS_Y>(state);
    const float weight = trellis_weight<VARIANT>(value, scale);
    TRELLIS_UNROLL
    for (int m = 0; m < ROWS; m++) {
      sums[m][j] = fma(weight, xs[m], sums[m][j]);
    }
  }
}

if (active) {
  const uint column = block * BT + BT - 1 - (word * TRELLIS_WORD_BITS + start) / K;
  TRELLIS_UNROLL
  for (int j = 0; j < NP; j++) {
    if (start + j * K < TRELLIS_WORD_BITS) {
      TRELLIS_UNROLL
      for (int m = 0; m < ROWS; m++) {
        partial[ulong((sample + m) * SPLITS + split) * C + column - j] = sums[m][j];
      }
    }
  }
}
