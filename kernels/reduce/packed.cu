// Axis 1, contract P, every geometry and M: out[m, r] = T(sum over c of w[r, c] * x[m, c]), one fma per weight and row of x,
// 32 running sums of columns lane, lane+32, ...
// Inputs  x [M, C] (T), codes, scales [R].  Output out [M, R] (T).
// Ints    M R C BT K L INTERLEAVE.
// Launch  grid ceil(R/4) x ceil(M/8) blocks of 128 threads; a warp for a row.
using namespace trellis;
const int lane = threadIdx.x & 31;
const int r = blockIdx.x * 4 + (threadIdx.x >> 5);
const int m0 = blockIdx.y * 8, many = M - m0 < 8 ? M - m0 : 8;
if (r < R) {
  const float scale = to_float(scales[r]);
  float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
  for (int c = lane; c < C; c += 32) {
    const unsigned* ring = codes + block_offset<K, BT, INTERLEAVE>(r, c / BT, R, C / BT);
    const float w = weight_packed(y_of_hash(hash(state_at<K, L, BT>(ring, c % BT))), scale);
#pragma unroll
    for (int m = 0; m < (M < 8 ? M : 8); ++m)
      if (m < many) sum[m] = __fmaf_rn(w, to_float(x[(long long)(m0 + m) * C + c]), sum[m]);
  }
#pragma unroll
  for (int m = 0; m < (M < 8 ? M : 8); ++m) {
    if (m < many) {
      float v = sum[m];
#pragma unroll
      for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
      if (lane == 0) out[(long long)(m0 + m) * R + r] = cast<T>::of(v);
    }
  }
}
