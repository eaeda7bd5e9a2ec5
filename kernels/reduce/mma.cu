// Axis 1, contract F on tensor cores, M = 1..=8: partial[part, m, r] = scale[r] / d * sum over the part's columns c of y[r, c] * x[m, c].
//
// Inputs  x [M, C] (T), codes, scales [R] binary16.  Output partial [PARTS, M, R] float32, PARTS = ceil(C/128/WARPS);
// every element is written.
// Ints    M R C BT K L INTERLEAVE SPLITS WARPS STAGES GROUPS EXACT.
// Needs   BT in {32, 64, 128, 256}, C % 256 == 0; EXACT only with M <= 4.
// Launch  grid PARTS x SPLITS blocks of 32*WARPS threads, no dynamic shared memory.
//
// A warp keeps 128 columns of x as B fragments in registers and goes through its split's rows, 16 at a time. Lane (g, t)
// decodes run t (32 columns) of rows g and g+8. The warps' sums meet in shared memory once every GROUPS steps.
using namespace trellis;
using P = typename Policy<EXACT>::Type;
using DG = Digits<EXACT, M>;
constexpr int TILES = C / 128;
constexpr int ROW_WORDS = INTERLEAVE ? 48 : C / 32 * K;
constexpr int RS = K <= 2 ? 12 : 20;  // words of a staged row: 4*K and one more
constexpr int ALL_STEPS = (R + 15) / 16;
constexpr int RING_BYTES = STAGES * 16 * RS * 4;
constexpr int NT = EXACT && M > 2 ? 2 : 1;  // tiles of 8 columns of B
constexpr int DIGIT_BYTES = EXACT ? 4 * 33 * 8 * NT : 0;
constexpr int PLACES = EXACT ? 4 * NT : 8;  // numbers kept of an output row: two digits each, or columns of B
constexpr int RESULT_BYTES = GROUPS * 16 * PLACES * 4 > DIGIT_BYTES ? GROUPS * 16 * PLACES * 4 : (DIGIT_BYTES + 15) / 16 * 16;
constexpr bool WIDE = !EXACT && sizeof(T) == 4;  // float32 activations: what rounding to tf32 leaves over goes
constexpr bool SPLIT = WIDE && M <= 4;           // into B columns 4..7,
constexpr bool TWICE = WIDE && M > 4;            // or into a second product
__shared__ __align__(16) unsigned char rings[WARPS * RING_BYTES];
__shared__ __align__(16) unsigned char results[WARPS * RESULT_BYTES];
constexpr int MOST_ROWS = (ALL_STEPS + SPLITS - 1) / SPLITS * 16;
__shared__ int cuts[WARPS][8];
__shared__ float row_scales[MOST_ROWS <= 1024 ? MOST_ROWS : 1];  // few rows: asked for at the start
__shared__ float factors[WARPS][8][2];

const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
const int part = blockIdx.x, split = blockIdx.y, tile = part * WARPS + warp;
const bool busy = tile < TILES;
const int step0 = (int)((long long)split * ALL_STEPS / SPLITS), step1 = (int)((long long)(split + 1) * ALL_STEPS / SPLITS);
const unsigned* ring = reinterpret_cast<const unsigned*>(rings + warp * RING_BYTES);
const unsigned ring_at = shared_address(ring);
const unsigned* tile_codes = codes + (INTERLEAVE ? (long long)(tile / 4) * R * 48 + tile / 2 % 2 * 24 : (long long)(tile / 2) * (8 * K));
const int half = tile & 1;
if (lane < 8) cuts[warp][lane] = EXACT ? HIGH_INF : 0x7f800000;

const int next_word = word_after<K, BT>(t * K, K);

for (int pass = 0;; ++pass) {

  // This warp's 128 columns of x as B fragments: symbol i of run t.
  unsigned b[32], b2[NT == 2 ? 32 : 1], rest[TWICE ? 32 : 1];
  bool left = false, wild = false;
  int bias[4] = {0, 0, 0, 0}, bias2[4] = {0, 0, 0, 0};
  // x is asked for before the first codes, which would keep it waiting.
  constexpr int EACH = 16 / sizeof(T);
  const int m = SPLIT ? g & 3 : g;
  alignas(16) T raw[EXACT ? 1 : 32];
  float xs[EXACT ? M : 1][4];
  if constexpr (EXACT) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) xs[m][i] = busy ? to_float(x[(long long)m * C + tile_base<BT>(tile) + i * 32 + lane]) : 0.0f;
    }
  } else {
    const T* from = x + (long long)(m < M ? m : 0) * C + tile_base<BT>(tile) + tile_column<BT>(t * 32 + 31);
    const bool aligned = (reinterpret_cast<unsigned long long>(x) & 15) == 0;
    if (busy && m < M) {
      if (aligned) {
#pragma unroll
        for (int i = 0; i < 32; i += EACH) *reinterpret_cast<uint4*>(raw + (EXACT ? 0 : i)) = *reinterpret_cast<const uint4*>(from + i);
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) raw[EXACT ? 0 : i] = from[i];
      }
    }
  }
  if (MOST_ROWS <= 1024 && pass == 0) {
    for (int i = threadIdx.x; i < MOST_ROWS; i += 32 * WARPS) row_scales[i] = step0 * 16 + i < R ? to_float(scales[step0 * 16 + i]) : 0.0f;
  }
  int ahead = step0;
  Fetch<K, BT, R, ROW_WORDS, RS> fetch(tile_codes, half, step0, ring_at, lane);
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (busy && ahead < step1) fetch.next(s, lane);
    ++ahead;
    copy_commit();
  }
  __syncwarp();
  if constexpr (!EXACT) {
    unsigned least = ~0u, greatest = 0;  // of the finite values that are not zero; least is one below
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float f = busy && m < M ? to_float(raw[EXACT ? 0 : i]) : 0.0f;
      const unsigned h = __float_as_uint(f) & 0x7fffffffu;
      least = min(least, h - 1);
      greatest = max(greatest, h);
      b[31 - i] = __float_as_uint(f);
    }
    const bool plain = pass == 0 && __all_sync(0xffffffffu, least >= (27u << 23) - 1 && greatest < (227u << 23));
    if (plain) {
      if (lane < 8) { factors[warp][lane][0] = 1.0f; factors[warp][lane][1] = 1.0f / TRELLIS_DIVISOR; }
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const float f = __uint_as_float(b[i]), top = to_tf32(f), low = f - top;
          b[i] = __float_as_uint(SPLIT && g >= 4 ? low : top);
          if (TWICE) rest[TWICE ? i : 0] = __float_as_uint(low);
        }
    } else {
      // In binary32: x is not yet scaled, so its own exponents are all there are.
      const unsigned cut = (unsigned)cuts[warp][g];
      unsigned most = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const unsigned h = b[i] & 0x7fffffffu;
          most = max(most, h < cut ? h : 0u);
        }
      most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const int e = most == 0 ? 0 : (int)(most >> 23) - 127;
      const unsigned below = (int)(most >> 23) <= DG::SPAN ? 0u : ((most >> 23) - DG::SPAN) << 23;
      const float up0 = power_of_two_f(-(e >> 1)), up1 = power_of_two_f(-(e - (e >> 1)));
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const unsigned h = b[i] & 0x7fffffffu;
          const bool now = (h >= below) & ((h < cut) | ((pass == 0) & (h >= 0x7f800000u)));
          const float f = __uint_as_float(b[i]) * up0 * up1, top = to_tf32(f), low = h < 0x7f800000u ? f - top : 0.0f;
          b[i] = now ? __float_as_uint(SPLIT && g >= 4 ? low : top) : 0u;
          if (TWICE) rest[TWICE ? i : 0] = now ? __float_as_uint(low) : 0u;
        }
      left = least + 1 != 0 && least + 1 < below;
      __syncwarp();
      if (t == 0) {
        cuts[warp][g] = (int)below;
        factors[warp][g][0] = power_of_two_f(e >> 1);
        factors[warp][g][1] = power_of_two_f(e - (e >> 1)) * (1.0f / TRELLIS_DIVISOR);
      }
    }
  } else {
    unsigned char* digits = results + warp * RESULT_BYTES;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int cut = cuts[warp][m];
      int most = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = high_of((double)xs[m][i]);
        wild = wild || h >= HIGH_INF;
        if (h < cut && h > most) most = h;
      }
      most = __reduce_max_sync(0xffffffffu, most);
      const int e = most == 0 ? 0 : (most >> 20) - 1023;
      const int below = most == 0 ? 0 : ((most >> 20) - DG::SPAN) << 20;
      const double up = power_of_two(DG::POINT - e);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        double w = (double)xs[m][i];
        const int h = high_of(w);
        if (!(h < cut && h >= below)) w = 0.0;
        left = left || (h < below && h > 0);
        const int q = tile_column<BT>(i * 32 + lane);  // its own inverse
        unsigned char* to = digits + (q / 32 * 33 + q % 32) * (8 * NT);
        if (DG::D == 8) *reinterpret_cast<unsigned long long*>(to) = digits8(__double2ll_rn(w * up));
        else *reinterpret_cast<unsigned*>(to + 4 * m) = digits4(__double2int_rn(w * up));
      }
      __syncwarp();
      if (lane == 0) {
        cuts[warp][m] = below;
        const int down = e - DG::POINT;
        factors[warp][m][0] = power_of_two_f(down >> 1);
        factors[warp][m][1] = power_of_two_f(down - (down >> 1)) * (1.0f / TRELLIS_DIVISOR);
      }
    }
    __syncwarp();
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        b[i] = digits[(t * 33 + i) * (8 * NT) + g] * 0x01010101u;
        if (NT == 2) b2[NT == 2 ? i : 0] = digits[(t * 33 + i) * (8 * NT) + 8 + g] * 0x01010101u;
      }
    __syncwarp();
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        P::mma(bias, BIAS_BYTES, BIAS_BYTES, BIAS_BYTES, BIAS_BYTES, b[i], b[i + 1]);
        if constexpr (NT == 2) P::mma(bias2, BIAS_BYTES, BIAS_BYTES, BIAS_BYTES, BIAS_BYTES, b2[i], b2[i + 1]);
      }
  }
  const bool any_wild = EXACT && pass == 0 && __syncthreads_or(wild);

  typename P::Acc* mine = reinterpret_cast<typename P::Acc*>(results + warp * RESULT_BYTES);
  int slot = 0;
  for (int batch = step0; batch < step1; batch += GROUPS) {
    const int end = batch + GROUPS < step1 ? batch + GROUPS : step1;
    if (busy) {
      for (int step = batch; step < end; ++step) {
        copy_wait<STAGES - 2>();
        __syncwarp();
        if (ahead < step1) fetch.next(slot == 0 ? STAGES - 1 : slot - 1, lane);
        ++ahead;
        copy_commit();
        typename P::Acc acc[2][4], acc2[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) { acc[0][i] = -bias[i]; acc[1][i] = 0; acc2[0][i] = -bias2[i]; acc2[1][i] = 0; }
        const unsigned* stage = ring + slot * (16 * RS) + g * RS;
        unsigned wa[K + 1], wb[K + 1];
        load_words<K>(wa, stage + t * K);
        load_words<K>(wb, stage + 8 * RS + t * K);
        wa[K] = stage[next_word];
        wb[K] = stage[8 * RS + next_word];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const unsigned a0 = P::a(Run<K, L, EXACT>::at(wa, 2 * j)), a1 = P::a(Run<K, L, EXACT>::at(wb, 2 * j));
          const unsigned a2 = P::a(Run<K, L, EXACT>::at(wa, 2 * j + 1)), a3 = P::a(Run<K, L, EXACT>::at(wb, 2 * j + 1));
          P::mma(acc[j & 1], a0, a1, a2, a3, b[2 * j], b[2 * j + 1]);
          if constexpr (NT == 2) P::mma(acc2[j & 1], a0, a1, a2, a3, b2[2 * j], b2[2 * j + 1]);
          if constexpr (TWICE) P::mma(acc[j & 1], a0, a1, a2, a3, rest[2 * j], rest[2 * j + 1]);
        }
        typename P::Acc* to = mine + ((step - batch) * 16 + g) * PLACES;
        if constexpr (EXACT) {
          // Two digits' sums make one number that still fits 32 bits: 128 columns of at most 510 * 128 each.
          to[t] = acc[0][0] + acc[1][0] + (acc[0][1] + acc[1][1]) * 256;
          to[8 * PLACES + t] = acc[0][2] + acc[1][2] + (acc[0][3] + acc[1][3]) * 256;
          if constexpr (NT == 2) {
            to[4 + t] = acc2[0][0] + acc2[1][0] + (acc2[0][1] + acc2[1][1]) * 256;
            to[8 * PLACES + 4 + t] = acc2[0][2] + acc2[1][2] + (acc2[0][3] + acc2[1][3]) * 256;
          }
        } else {
          *reinterpret_cast<float2*>(to + 2 * t) = make_float2(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]);
          *reinterpret_cast<float2*>(to + 8 * PLACES + 2 * t) = make_float2(acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
      }
    }
    __syncthreads();
    const int rows = (end - batch) * 16;
    // A thread sums four columns of B (or all digits) of an output row over the warps, in warp order.
    constexpr int QUADS = !EXACT && M > 4 ? 2 : 1, OUTS = M < 4 ? M : 4;
    for (int i = threadIdx.x; i < GROUPS * 16 * QUADS; i += 32 * WARPS) {
      const int r = i / QUADS, m0 = i % QUADS * 4, out_row = batch * 16 + r;
      if (r < rows && out_row < R) {
        float sum[OUTS];
#pragma unroll
        for (int m = 0; m < OUTS; ++m) sum[m] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          if (part * WARPS + w < TILES) {
            const typename P::Acc* from = reinterpret_cast<const typename P::Acc*>(results + w * RESULT_BYTES) + r * PLACES;
            float v[4];
            if constexpr (EXACT) {
              const int4 d = *reinterpret_cast<const int4*>(from);
              if constexpr (M == 1) {
                v[0] = (((float)d.w * 65536.0f + (float)d.z) * 65536.0f + (float)d.y) * 65536.0f + (float)d.x;
              } else {
                v[0] = (float)d.y * 65536.0f + (float)d.x;
                v[1] = (float)d.w * 65536.0f + (float)d.z;
              }
              if constexpr (NT == 2) {
                const int4 d2 = *reinterpret_cast<const int4*>(from + 4);
                v[2] = (float)d2.y * 65536.0f + (float)d2.x;
                v[3] = (float)d2.w * 65536.0f + (float)d2.z;
              }
            } else {
              const float4 d = *reinterpret_cast<const float4*>(from + m0);
              v[0] = d.x; v[1] = d.y; v[2] = d.z; v[3] = d.w;
              if constexpr (SPLIT) {
                const float4 d2 = *reinterpret_cast<const float4*>(from + 4);
                v[0] += d2.x; v[1] += d2.y; v[2] += d2.z; v[3] += d2.w;
              }
            }
#pragma unroll
            for (int m = 0; m < OUTS; ++m) sum[m] += v[m] * factors[w][m0 + m][0] * factors[w][m0 + m][1];
          }
        }
        if (any_wild) {
          const int most = (part + 1) * WARPS < TILES ? (part + 1) * WARPS : TILES;
          for (int q = part * WARPS * 128; q < most * 128; ++q) {
            const int c = tile_base<BT>(q / 128) + q % 128;
#pragma unroll
            for (int m = 0; m < OUTS; ++m) {
              const float p = to_float(x[(long long)m * C + c]);
              if (!(fabsf(p) < __int_as_float(0x7f800000)))
                sum[m] += y_of_hash(hash(state_at<K, L, BT>(codes + block_offset<K, BT, INTERLEAVE>(out_row, c / BT, R, C / BT), c % BT))) * p;
            }
          }
        }
        const float scale = MOST_ROWS <= 1024 ? row_scales[MOST_ROWS <= 1024 ? (batch - step0) * 16 + r : 0] : to_float(scales[out_row]);
#pragma unroll
        for (int m = 0; m < OUTS; ++m) {
          if (m0 + m < M) {
            float* to = partial + ((long long)part * M + m0 + m) * R + out_row;
            *to = pass == 0 ? sum[m] * scale : *to + sum[m] * scale;
          }
        }
      }
    }
    __syncthreads();
  }
  copy_wait<0>();
  if (!__syncthreads_or(left)) break;
}
