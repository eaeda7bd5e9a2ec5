// out[i] = T(sum over splits, in ascending order, of partial[split, i]); SIZE elements, SPLITS parts.
// Launch: SIZE threads in blocks of 128.
const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
if (i < SIZE) {
  float sum = 0.0f;
#pragma unroll 32
  for (int s = 0; s < SPLITS; ++s) sum = __fadd_rn(sum, partial[(long long)s * SIZE + i]);
  out[i] = trellis::cast<T>::of(sum);
}
