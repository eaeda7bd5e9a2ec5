constexpr int WPB = BT * K / TRELLIS_WORD_BITS;
constexpr int SIDE = INTERLEAVE ? INTERLEAVE : C / BT;

const uint column = thread_position_in_grid.x;
const uint row = thread_position_in_grid.y;
const ulong at = trellis_block<SIDE, WPB>(R, row, column / BT);
const uint bit = (BT - 1 - column % BT) * K;
const uint word = bit / TRELLIS_WORD_BITS;
const uint next = word + 1 == WPB ? 0 : word + 1;
const uint2 ring = trellis_ring(codes[at + word], codes[at + next], bit % TRELLIS_WORD_BITS);
out[ulong(row) * C + column] = trellis_expanded<T>(trellis_window<L>(ring, 0), float(scales[row]));
