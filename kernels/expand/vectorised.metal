constexpr int WPB = BT * K / TRELLIS_WORD_BITS;
constexpr int SIDE = INTERLEAVE ? INTERLEAVE : C / BT;
constexpr int NEIGHBOURS = 4;

const uint column = thread_position_in_grid.x * NEIGHBOURS;
const uint row = thread_position_in_grid.y;
const ulong at = trellis_block<SIDE, WPB>(R, row, column / BT);
// The last neighbour's window is the lowest; all four end within the word it starts in and the next.
const uint bit = (BT - NEIGHBOURS - column % BT) * K;
const uint word = bit / TRELLIS_WORD_BITS;
const uint next = word + 1 == WPB ? 0 : word + 1;
const uint2 ring = trellis_ring(codes[at + word], codes[at + next], bit % TRELLIS_WORD_BITS);
const float scale = float(scales[row]);
vec<T, NEIGHBOURS> weights;
TRELLIS_UNROLL
for (int j = 0; j < NEIGHBOURS; j++) {
  weights[NEIGHBOURS - 1 - j] = trellis_expanded<T>(trellis_window<L>(ring, j * K), scale);
}
*(device vec<T, NEIGHBOURS>*)(out + ulong(row) * C + column) = weights;
