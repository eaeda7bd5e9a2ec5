constexpr int WPB = BT * K / TRELLIS_WORD_BITS;
constexpr int BLOCKS = C / BT;
constexpr int SIDE = INTERLEAVE ? INTERLEAVE : BLOCKS;
constexpr int SYMBOLS = BT / TRELLIS_LANES;
constexpr int ROWS = M > 1 && VARIANT >= TRELLIS_SHARED_SCATTER ? M : 1;
constexpr int SPAN = (R + SPLITS - 1) / SPLITS;

threadgroup float table[FLOAT_CODEBOOK ? 1 << L : 1];
threadgroup short numerators[CODEBOOK ? 1 << L : 1];
if (FLOAT_CODEBOOK || CODEBOOK) {
  for (uint s = thread_index_in_threadgroup; s < 1u << L; s += THREADS) {
    if (FLOAT_CODEBOOK) {
      table[s] = trellis_unrefined(trellis_float_y<BITS_Y>(s));
    }
    if (CODEBOOK) {
      numerators[s] = short(trellis_y(s));
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

const uint lane = thread_index_in_simdgroup;
const uint block = threadgroup_position_in_grid.y * SG_TG + simdgroup_index_in_threadgroup;
const uint split = threadgroup_position_in_grid.z % SPLITS;
const uint sample = threadgroup_position_in_grid.z / SPLITS;
// The lane's symbols start in this word and end in it or the next one of the ring.
const uint bit = lane * SYMBOLS * K;
const uint word = bit / TRELLIS_WORD_BITS;
const uint next = word + 1 == WPB ? 0 : word + 1;

float sums[ROWS][SYMBOLS];
TRELLIS_UNROLL
for (int m = 0; m < ROWS; m++) {
  TRELLIS_UNROLL
  for (int j = 0; j < SYMBOLS; j++) {
    sums[m][j] = 0;
  }
}

const uint first = split * SPAN;
const uint last = block < BLOCKS ? min(first + SPAN, uint(R)) : first;
for (uint r = first; r < last; r++) {
  const ulong at = trellis_block<SIDE, WPB>(R, r, block);
  const uint2 ring = trellis_ring(codes[at + word], codes[at + next], bit % TRELLIS_WORD_BITS);
  const float scale = float(scales[r]);
  float xs[ROWS];
  TRELLIS_UNROLL
  for (int m = 0; m < ROWS; m++) {
    xs[m] = float(x[ulong(sample + m) * R + r]);
  }
  TRELLIS_UNROLL
  for (int j = 0; j < SYMBOLS; j++) {
    const uint state = trellis_window<L>(ring, j * K);
    const float value = FLOAT_CODEBOOK ? table[state]
        : CODEBOOK                     ? trellis_unrefined(float(numerators[state]))
                                       : trellis_value<VARIANT, BITS_Y>(state);
    const float weight = trellis_weight<VARIANT>(value, scale);
    TRELLIS_UNROLL
    for (int m = 0; m < ROWS; m++) {
      sums[m][j] = fma(weight, xs[m], sums[m][j]);
    }
  }
}

if (block < BLOCKS) {
  const uint column = block * BT + BT - 1 - lane * SYMBOLS;
  TRELLIS_UNROLL
  for (int m = 0; m < ROWS; m++) {
    TRELLIS_UNROLL
    for (int j = 0; j < SYMBOLS; j++) {
      partial[ulong((sample + m) * SPLITS + split) * C + column - j] = sums[m][j];
    }
  }
}
