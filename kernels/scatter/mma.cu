// Axis 0, contract F on tensor cores, M = 1..=8: partial[split, m, c] = sum over the split's rows of w[r, c] * x[m, r].
//
// Inputs  x [M, R] (T), codes, scales [R] binary16.  Output partial [SPLITS, M, C] float32; every element is written.
// Ints    M R C BT K L INTERLEAVE SPLITS RANGES STAGES EXACT.
// Needs   BT in {32, 64, 128, 256}, C % 256 == 0; EXACT only with M <= 4 (pays for M <= 2).
// Launch  grid (C/256) x SPLITS blocks of 64*RANGES threads, no dynamic shared memory.
//
// A block has 256 columns and RANGES ranges of rows; a warp has one tile of 128 columns of one range and takes 16 rows a
// step. Lane (g, t) decodes 16 columns (positions 16g.. of the tile) of rows t, t+4, t+8, t+12: its own A fragments.
// EXACT: signed digits of x against the hashes' bytes, integers throughout; else y and x in binary16, x in two parts.
using namespace trellis;
using DG = Digits<EXACT, M>;
using Acc = typename Policy<EXACT>::Type::Acc;
constexpr int WARPS = 2 * RANGES;
constexpr int ROW_WORDS = INTERLEAVE ? 48 : C / 32 * K;
constexpr int RS = K == 1 ? 8 : K == 2 ? 12 : 20;       // words of a staged row: 4*K and one more
constexpr int WORDS = K >= 3 ? 3 : 2;                   // words a lane reads of a row
constexpr int ALIGNED = K == 1 ? 1 : K == 4 ? 3 : 2;    // words that hold its 16 windows once aligned
constexpr int ALL_STEPS = (R + 15) / 16;
constexpr int ALL_RANGES = SPLITS * RANGES;
constexpr int MOST_STEPS = (ALL_STEPS + ALL_RANGES - 1) / ALL_RANGES;
constexpr int CHUNK = MOST_STEPS < 16 ? MOST_STEPS : 16;
constexpr int CHUNKS = (MOST_STEPS + CHUNK - 1) / CHUNK;
constexpr int STAGE_BYTES = 16 * RS * 4;
constexpr int NT = EXACT && M > 2 ? 2 : 1;  // tiles of 8 columns of B
constexpr int B_ROW = EXACT ? 8 * NT : 16;      // bytes of B for a row
constexpr int SPAN = EXACT ? DG::SPAN : 26, POINT = EXACT ? DG::POINT : 14;
constexpr int ENTRIES = RANGES * CHUNK * 16;
constexpr bool SPLIT = !EXACT && M <= 4;  // B columns 4..7 hold what rounding to binary16 left over of columns 0..3
constexpr bool TWICE = !EXACT && M > 4;   // a second product for that
constexpr int B_BYTES = ENTRIES * (B_ROW + (TWICE ? 16 : 0));
constexpr int OWN = (CHUNK * 16 + 63) / 64;  // rows of a chunk that a thread prepares
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int SUM_M = 292;  // floats of one row of x in a range's sums: (16*half + symbol)*9 + run, padded
constexpr int SUM_FLOATS = M * SUM_M;
constexpr int BYTES = RING_BYTES + B_BYTES > RANGES * SUM_FLOATS * 4 ? RING_BYTES + B_BYTES : RANGES * SUM_FLOATS * 4;
__shared__ __align__(16) unsigned char shared_bytes[BYTES];
__shared__ int cuts[2][8];  // of this pass and the next
__shared__ unsigned mosts[8][WARPS];
__shared__ float factors[8][2];
__shared__ int left_from[RANGES], left_to[RANGES];

const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
const int half = warp & 1, range = warp >> 1;
const int pair = blockIdx.x, split = blockIdx.y;
auto first_step = [&](int id) {
  if constexpr ((long long)ALL_STEPS * ALL_RANGES < (1ll << 31)) return (int)((unsigned)id * (unsigned)ALL_STEPS / (unsigned)ALL_RANGES);
  else return (int)((long long)id * ALL_STEPS / ALL_RANGES);
};
const int step0 = first_step(split * RANGES + range), step1 = first_step(split * RANGES + range + 1);
const unsigned ring_at = shared_address(shared_bytes) + warp * (STAGES * STAGE_BYTES);
unsigned char* digits = shared_bytes + RING_BYTES;
__half* values = reinterpret_cast<__half*>(digits);
constexpr int RESTS = ENTRIES * 8;
// Place of row i of the block's buffer, column n: rows t, t+4 and t+8, t+12 of a step are pairs along k.
auto place = [&](int i, int n) { return (((i >> 4) * 2 + ((i >> 3) & 1)) * 4 + (i & 3)) * 16 + n * 2 + ((i >> 2) & 1); };
auto put = [&](int i, int m, float v) {
  const __half top = __float2half_rn(v), low = __float2half_rn(v - __half2float(top));
  values[place(i, m)] = top;
  if (SPLIT) values[place(i, m + 4)] = low;
  else values[RESTS + place(i, m)] = low;
};
const unsigned* tile_codes = codes + (INTERLEAVE ? (long long)(pair / 2) * R * 48 + (pair % 2) * 24 : (long long)pair * (8 * K));

// Where this lane's words of a staged row are, in bytes from the row's start.
const int word0 = g * K / 2, shift = g * K % 2 * 16;
int offsets[WORDS];
#pragma unroll
for (int d = 0; d < WORDS; ++d) offsets[d] = (t * RS + word_after<K, BT>(word0, d)) * 4;

bool first = true;
for (int chunk = 0; chunk < CHUNKS; ++chunk) {
  int from = step0 + chunk * CHUNK, to = from + CHUNK < step1 ? from + CHUNK : step1;
  const int base = from, whole = (to - from) * 16;
  for (int pass = 0;; ++pass) {

    // Activations of the chunk into B: each pair of warps those of its own range; one exponent for the block. They are asked for
    // before the first codes, which would keep them waiting.
    if (threadIdx.x < RANGES) { left_from[threadIdx.x] = 1 << 30; left_to[threadIdx.x] = 0; }
    const int own = half * 32 + lane, rows = (whole < R - base * 16 ? whole : R - base * 16);
    float xs[M][OWN], ss[OWN];
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
      const int i = own + k * 64;
      const bool in = i < rows;
      ss[k] = in ? to_float(scales[base * 16 + i]) : 0.0f;
#pragma unroll
      for (int m = 0; m < M; ++m) xs[m][k] = in ? to_float(x[m * R + (base * 16 + i)]) : 0.0f;
    }
    int ahead = from;
    Fetch<K, BT, R, ROW_WORDS, RS> fetch(tile_codes, half, from, ring_at, lane);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
      if (ahead < to) fetch.next(s, lane);
      ++ahead;
      copy_commit();
    }
    auto leave = [&](int i) {  // row i of the range waits for the next pass
      atomicMin(&left_from[range], i >> 4);
      atomicMax(&left_to[range], (i >> 4) + 1);
    };
    bool wild = false;  // infinity or NaN: left out of B and added at the end
    // Everything in binary32 if every |x| is zero or in 2^-60..2^90: then no product with a scale leaves its range.
    unsigned least = ~0u, greatest = 0;
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const unsigned h = __float_as_uint(xs[m][k]) & 0x7fffffffu;
        least = min(least, h - 1);
        greatest = max(greatest, h);
      }
    }
    wild = greatest >= 0x7f800000u;
    unsigned bad = least < (67u << 23) - 1 || greatest >= (217u << 23);
    {
      float p[M][OWN];
#pragma unroll
      for (int k = 0; k < OWN; ++k) {
#pragma unroll
        for (int m = 0; m < M; ++m) p[m][k] = xs[m][k] * ss[k];
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const unsigned cut = pass == 0 ? 0x7f800000u : (unsigned)cuts[pass & 1][m];
        unsigned most = 0;
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
          const unsigned h = __float_as_uint(p[m][k]) & 0x7fffffffu;
          most = max(most, h < cut ? h : 0u);
        }
        most = __reduce_max_sync(0xffffffffu, most);
        if (lane == 0) mosts[m][warp] = most;
      }
      bad = __syncthreads_or(bad);
      if (!bad) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const unsigned cut = pass == 0 ? 0x7f800000u : (unsigned)cuts[pass & 1][m];
          unsigned most = 0;
#pragma unroll
          for (int w = 0; w < WARPS; ++w) most = max(most, mosts[m][w]);
          const int top = most >> 23, e = most == 0 ? 0 : top - 127;
          const unsigned below = most == 0 ? 0u : (top - SPAN) << 23;
          const float up = power_of_two_f(EXACT && DG::D == 8 ? 0 : POINT - e);
#pragma unroll
          for (int k = 0; k < OWN; ++k) {
            const int i = own + k * 64;
            const unsigned u = __float_as_uint(p[m][k]), h = u & 0x7fffffffu;
            const bool now = h < cut && h >= below;
            if (i < CHUNK * 16) {
              if constexpr (!EXACT) {
                put(range * CHUNK * 16 + i, m, now ? p[m][k] * up : 0.0f);
              } else if (DG::D == 8) {
                const long long v = now && h ? (long long)((h & 0x7fffffu) | 0x800000u) << ((int)(h >> 23) - top + 38) : 0;
                *reinterpret_cast<unsigned long long*>(digits + (range * CHUNK * 16 + i) * B_ROW) = digits8((int)u < 0 ? -v : v);
              } else {
                *reinterpret_cast<unsigned*>(digits + (range * CHUNK * 16 + i) * B_ROW + 4 * m) = digits4(now ? __float2int_rn(p[m][k] * up) : 0);
              }
              if (h < below && h > 0) leave(i);
            }
          }
          if (threadIdx.x == 0) {
            const int down = e - POINT;
            cuts[(pass + 1) & 1][m] = (int)below;
            factors[m][0] = power_of_two_f(down >> 1);
            factors[m][1] = power_of_two_f(down - (down >> 1)) * (1.0f / TRELLIS_DIVISOR);
          }
        }
      }
    }
    if (bad) {
      // The same in binary64, exponents compared as high words.
      if (pass == 0 && threadIdx.x < 8) cuts[0][threadIdx.x] = HIGH_INF;
      __syncthreads();
#pragma unroll 1
      for (int m = 0; m < M; ++m) {
        const int cut = cuts[pass & 1][m];
        auto product = [&](int i) { return i < rows ? (double)to_float(x[(long long)m * R + base * 16 + i]) * (double)to_float(scales[base * 16 + i]) : 0.0; };
        int most = 0;
#pragma unroll 1
        for (int i = own; i < CHUNK * 16; i += 64) {
          const int h = high_of(product(i));
          most = max(most, h < cut ? h : 0);
        }
        most = __reduce_max_sync(0xffffffffu, most);
        if (lane == 0) mosts[m][warp] = most;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; ++w) most = max(most, (int)mosts[m][w]);
        const int e = most == 0 ? 0 : (most >> 20) - 1023;
        const int below = most == 0 ? 0 : ((most >> 20) - SPAN) << 20;
        const double up = power_of_two(POINT - e);
#pragma unroll 1
        for (int i = own; i < CHUNK * 16; i += 64) {
          double v = product(i);
          const int h = high_of(v), at = range * CHUNK * 16 + i;
          if (!(h < cut && h >= below)) v = 0.0;
          if constexpr (!EXACT) put(at, m, (float)(v * up));
          else if (DG::D == 8) *reinterpret_cast<unsigned long long*>(digits + at * B_ROW) = digits8(__double2ll_rn(v * up));
          else *reinterpret_cast<unsigned*>(digits + at * B_ROW + 4 * m) = digits4(__double2int_rn(v * up));
          if (h < below && h > 0) leave(i);
        }
        if (threadIdx.x == 0) {
          const int down = e - POINT;
          cuts[(pass + 1) & 1][m] = below;
          factors[m][0] = power_of_two_f(down >> 1);
          factors[m][1] = power_of_two_f(down - (down >> 1)) * (1.0f / TRELLIS_DIVISOR);
        }
      }
    }
    const bool any_wild = pass == 0 ? __syncthreads_or(wild) : (__syncthreads(), false);

    Acc acc[NT][8][4];
    const unsigned char* b = digits + (range * CHUNK + from - base) * (16 * B_ROW) + (EXACT ? t * B_ROW + g : (t * 8 + g) * 4);
    int bias[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bias[n][i] = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[n][j][i] = 0;
      }
    }

    int slot = 0;
    for (int step = from; step < to; ++step) {
      copy_wait<STAGES - 2>();
      __syncwarp();
      if (ahead < to) fetch.next(slot == 0 ? STAGES - 1 : slot - 1, lane);
      ++ahead;
      copy_commit();
      const unsigned char* stage = shared_bytes + warp * (STAGES * STAGE_BYTES) + slot * STAGE_BYTES;
      auto words = [&](unsigned (&a)[ALIGNED], int row) {
        unsigned w[WORDS];
#pragma unroll
        for (int d = 0; d < WORDS; ++d) w[d] = *reinterpret_cast<const unsigned*>(stage + offsets[d] + row * (RS * 4));
#pragma unroll
        for (int d = 0; d < ALIGNED; ++d) a[d] = K % 2 == 1 ? __funnelshift_r(w[d], w[d + 1], shift) : w[d];
      };
      using Windows = Run<K, L, EXACT>;
      if constexpr (EXACT) {
#pragma unroll
        for (int r = 0; r < 16; r += 8) {
          unsigned a[2][ALIGNED], b0[NT], b1[NT];
          words(a[0], r);
          words(a[1], r + 4);
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            b0[n] = b[r * B_ROW + n * 8] * 0x01010101u;
            b1[n] = b[(r + 4) * B_ROW + n * 8] * 0x01010101u;
            Exact::mma(bias[n], BIAS_BYTES, BIAS_BYTES, BIAS_BYTES, BIAS_BYTES, b0[n], b1[n]);
          }
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const unsigned a0 = Windows::at(a[0], 2 * j), a1 = Windows::at(a[0], 2 * j + 1);
            const unsigned a2 = Windows::at(a[1], 2 * j), a3 = Windows::at(a[1], 2 * j + 1);
#pragma unroll
            for (int n = 0; n < NT; ++n) Exact::mma(acc[n][j], a0, a1, a2, a3, b0[n], b1[n]);
          }
        }
      } else {
        unsigned a[4][ALIGNED];
#pragma unroll
        for (int r = 0; r < 4; ++r) words(a[r], 4 * r);
        unsigned last[4] = {0, 0, 0, 0};
        const unsigned* pairs = reinterpret_cast<const unsigned*>(b);
        const unsigned b0 = pairs[0], b1 = pairs[32], r0 = TWICE ? pairs[RESTS / 2] : 0, r1 = TWICE ? pairs[RESTS / 2 + 32] : 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const unsigned a0 = Half::a(Windows::at(a[0], 2 * j), Windows::at(a[1], 2 * j));
          const unsigned a1 = Half::a(Windows::at(a[0], 2 * j + 1), Windows::at(a[1], 2 * j + 1));
          const unsigned a2 = Half::a(Windows::at(a[2], 2 * j), Windows::at(a[3], 2 * j));
          const unsigned a3 = Half::a(Windows::at(a[2], 2 * j + 1), Windows::at(a[3], 2 * j + 1));
          Half::mma(acc[0][j], a0, a1, a2, a3, b0, b1);
          if constexpr (TWICE) {
            // One column pair behind, so that it doesn't wait for the product just above.
            if (j > 0) Half::mma(acc[0][j - 1], last[0], last[1], last[2], last[3], r0, r1);
            last[0] = a0; last[1] = a1; last[2] = a2; last[3] = a3;
          }
        }
        if constexpr (TWICE) Half::mma(acc[0][7], last[0], last[1], last[2], last[3], r0, r1);
      }
      b += 16 * B_ROW;
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    copy_wait<0>();
    __syncthreads();

    // Sums of the ranges, in order.
    float* sums = reinterpret_cast<float*>(shared_bytes) + range * SUM_FLOATS + half * (16 * 9);
    if constexpr (!EXACT) {
      const float fa0 = factors[2 * t][0], fb0 = factors[2 * t][1];
      const float fa1 = factors[2 * t + 1][0], fb1 = factors[2 * t + 1][1];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float* at = sums + (2 * j + h) * 9 + g;
          float v0 = acc[0][j][2 * h], v1 = acc[0][j][2 * h + 1];
          if (SPLIT) { v0 += __shfl_xor_sync(0xffffffffu, v0, 2); v1 += __shfl_xor_sync(0xffffffffu, v1, 2); }
          if (2 * t < M) at[2 * t * SUM_M] = v0 * fa0 * fb0;
          if (2 * t + 1 < M) at[(2 * t + 1) * SUM_M] = v1 * fa1 * fb1;
        }
      }
    } else {
      // Lane t holds digits 2t and 2t+1 (one row of x), or of row t/2 the digits 2(t%2) and 2(t%2)+1.
      const float digit_place = power_of_two_f(16 * (M == 1 ? t : t & 1));
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const int m = M == 1 ? 0 : n * 2 + (t >> 1);
        const float fa = factors[m][0], fb = factors[m][1];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float v = ((float)(acc[n][i / 2][i % 2 * 2] - bias[n][0]) + 256.0f * (float)(acc[n][i / 2][i % 2 * 2 + 1] - bias[n][1])) * digit_place;
          v += __shfl_xor_sync(0xffffffffu, v, 1);
          if (M == 1) v += __shfl_xor_sync(0xffffffffu, v, 2);
          if (m < M && (M == 1 ? i % 4 == t : i % 2 == (t & 1))) sums[m * SUM_M + i * 9 + g] = v * fa * fb;
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int c = threadIdx.x; c < 256; c += 32 * WARPS) {
      const int q = BT == 256 ? 255 - c : c / 128 * 128 + c % 128 / BT * BT + BT - 1 - c % BT;
      const float* at = reinterpret_cast<const float*>(shared_bytes) + (q / 128 * 16 + q % 16) * 9 + q % 128 / 16;
      float* out = partial + (long long)split * M * C + pair * 256 + c;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        float v = first ? 0.0f : out[m * C];
#pragma unroll
        for (int r = 0; r < RANGES; ++r) v += at[r * SUM_FLOATS + m * SUM_M];
        out[m * C] = v;
      }
      if (any_wild) {
#pragma unroll 1
        for (int r = 0; r < RANGES; ++r) {
          const int from = (first_step(split * RANGES + r) + chunk * CHUNK) * 16, end = first_step(split * RANGES + r + 1) * 16;
          for (int row = from; row < from + CHUNK * 16 && row < end && row < R; ++row) {
            for (int m = 0; m < M; ++m) {
              const float p = to_float(x[(long long)m * R + row]);
              if (!(fabsf(p) < __int_as_float(0x7f800000))) {
                const unsigned* block = codes + block_offset<K, BT, INTERLEAVE>(row, (pair * 256 + c) / BT, R, C / BT);
                out[m * C] += y_of_hash(hash(state_at<K, L, BT>(block, c % BT))) * (p * to_float(scales[row]));
              }
            }
          }
        }
      }
    }
    first = false;
    from = base + left_from[range];
    to = base + left_to[range];
    if (!__syncthreads_or(from < to)) break;
    if (from > to) from = to;
  }
}
