constexpr int WPB = BT * BITS / TRELLIS_WORD_BITS;
constexpr int SIDE = INTERLEAVE ? INTERLEAVE : C / BT;
constexpr int THREADS = BN / 8 * TRELLIS_LANES;
constexpr int PER_THREAD = BK * BN / THREADS;
constexpr int THREADS_ROW = BN / PER_THREAD;
constexpr int PAD = 8;

// Two tiles, so that one barrier a step is enough: a tile is written again only after the barrier of the step between,
// which every SIMD group passes with its products of that tile done.
threadgroup T tiles[2][BK][BN + PAD];

const uint lane = thread_index_in_simdgroup;
const uint group = simdgroup_index_in_threadgroup;
const uint column = threadgroup_position_in_grid.x * BN;
const uint split = threadgroup_position_in_grid.z;
const uint begin = split * PARTITION;
const uint end = split + 1 == SPLITS ? KC : begin + PARTITION;

// The thread's neighbours in the tile, and the words of their block that hold their windows.
const uint tile_row = thread_index_in_threadgroup / THREADS_ROW;
const uint tile_column = thread_index_in_threadgroup % THREADS_ROW * PER_THREAD;
const uint block = column / BT;
const uint bit = (BT - PER_THREAD - (column % BT + tile_column)) * BITS;
const uint word = bit / TRELLIS_WORD_BITS;
const uint next = word + 1 == WPB ? 0 : word + 1;

// A lane holds two neighbours of one row of an 8 x 8 matrix.
const uint quad = lane / 4;
const uint frag_row = (quad & 4) + lane / 2 % 4;
const uint frag_column = (quad & 2) * 2 + lane % 2 * 2;

simdgroup_matrix<float, 8, 8> sums = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
uint turn = 0;
for (uint k = begin; k < end; k += BK, turn ^= 1) {
  const uint row = k + tile_row;
  if (row < end) {
    const ulong at = trellis_block<SIDE, WPB>(KC, row, block);
    const uint2 ring = trellis_ring(codes[at + word], codes[at + next], bit % TRELLIS_WORD_BITS);
    const float scale = float(scales[row]);
    TRELLIS_UNROLL
    for (int j = 0; j < PER_THREAD; j++) {
      tiles[turn][tile_row][tile_column + PER_THREAD - 1 - j] =
          trellis_expanded<T>(trellis_window<L>(ring, j * BITS), scale);
    }
  } else {
    TRELLIS_UNROLL
    for (int j = 0; j < PER_THREAD; j++) {
      tiles[turn][tile_row][tile_column + j] = T(0.0f);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  TRELLIS_UNROLL
  for (int step = 0; step < BK; step += 8) {
    simdgroup_matrix<float, 8, 8> left, right;
    TRELLIS_UNROLL
    for (int e = 0; e < 2; e++) {
      const uint input = k + step + frag_column + e;
      left.thread_elements()[e] = frag_row < M && input < end ? float(x[ulong(frag_row) * KC + input]) : 0.0f;
      right.thread_elements()[e] = float(tiles[turn][step + frag_row][group * 8 + frag_column + e]);
    }
    simdgroup_multiply_accumulate(sums, left, right, sums);
  }
}

if (frag_row < M) {
  TRELLIS_UNROLL
  for (int e = 0; e < 2; e++) {
    partial[ulong(split * M + frag_row) * N + column + group * 8 + frag_column + e] = sums.thread_elements()[e];
  }
}
