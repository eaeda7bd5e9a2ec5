// Whole-matrix decode, contract E, every geometry: out [R, C] (T) = T(exact(y) * scale).
// Inputs  codes, scales [R] binary16.  Output out [R, C] (T).
// Ints    R C BT K L INTERLEAVE.
// Launch  R*(C/8) threads in blocks of 256; a thread has 8 neighbouring weights (BT is a multiple of 8 in every geometry).
//
// The 8 windows span 7*K + L <= 44 bits and start at a multiple of 8*K, so two words hold them.
using namespace trellis;
const long long id = (long long)blockIdx.x * blockDim.x + threadIdx.x;
if (id < (long long)R * (C / 8)) {
  constexpr int WPB = BT * K / 32;
  const int r = (int)(id / (C / 8)), c = (int)(id % (C / 8)) * 8;
  const unsigned* ring = codes + block_offset<K, BT, INTERLEAVE>(r, c / BT, R, C / BT);
  const int p = (BT - 8 - c % BT) * K, word = p >> 5;
  const unsigned lo = ring[word], hi = ring[word + 1 == WPB ? 0 : word + 1];
  const unsigned w0 = __funnelshift_r(lo, hi, p & 31), w1 = hi >> (p & 31);
  const float scale = to_float(scales[r]);
  alignas(16) T v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = (7 - i) * K;
    const unsigned s = __funnelshift_r(w0, w1, at) & ((1u << L) - 1u);
    v[i] = cast<T>::of(weight_exact(y_of_hash(hash(s)), scale));
  }
  T* to = out + id * 8;
#pragma unroll
  for (int i = 0; i < (int)(8 * sizeof(T) / 16); ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(v)[i];
}
