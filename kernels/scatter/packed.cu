// Axis 0, contract P, every geometry and M: partial[split, m, c] = sum over the split's rows r, ascending, of w[r, c] * x[m, r],
// one fma per weight and row of x.
// Inputs  x [M, R] (T), codes, scales [R].  Output partial [SPLITS, M, C] float32.
// Ints    M R C BT K L INTERLEAVE SPLITS.
// Launch  grid ceil(C/128) x SPLITS x ceil(M/8) blocks of 128 threads.
using namespace trellis;
const int c = blockIdx.x * 128 + threadIdx.x;
const int m0 = blockIdx.z * 8, many = M - m0 < 8 ? M - m0 : 8;
if (c < C) {
  constexpr int EACH = (R + SPLITS - 1) / SPLITS;
  const int row0 = blockIdx.y * EACH, row1 = row0 + EACH < R ? row0 + EACH : R;
  float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
  for (int r = row0; r < row1; ++r) {
    const unsigned* ring = codes + block_offset<K, BT, INTERLEAVE>(r, c / BT, R, C / BT);
    const float w = weight_packed(y_of_hash(hash(state_at<K, L, BT>(ring, c % BT))), to_float(scales[r]));
#pragma unroll
    for (int m = 0; m < (M < 8 ? M : 8); ++m)
      if (m < many) sum[m] = __fmaf_rn(w, to_float(x[(long long)(m0 + m) * R + r]), sum[m]);
  }
#pragma unroll
  for (int m = 0; m < (M < 8 ? M : 8); ++m)
    if (m < many) partial[((long long)blockIdx.y * M + m0 + m) * C + c] = sum[m];
}
