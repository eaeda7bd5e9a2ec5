// Header text of every CUDA kernel: decode, conversions, asynchronous copies and tensor-core wrappers.
//
// Compiled by NVRTC, after MLX's own preamble (cuda_fp16.h, cuda_bf16.h). The format's constants come from the Rust
// prelude as macros in front of this text.

#ifndef TRELLIS_LINEAR
#define TRELLIS_LINEAR 1  // 0: every window of the exact policy masked by LOP3; 1: half of them by a second IMAD (see Run)
#endif
#ifndef TRELLIS_LINEAR_TF32
#define TRELLIS_LINEAR_TF32 0
#endif

namespace trellis {

#define TR_FN static __device__ __forceinline__

TR_FN float to_float(float v) { return v; }
TR_FN float to_float(__half v) { return __half2float(v); }
TR_FN float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T> struct cast;
template <> struct cast<float> { TR_FN float of(float v) { return v; } };
template <> struct cast<__half> { TR_FN __half of(float v) { return __float2half_rn(v); } };
template <> struct cast<__nv_bfloat16> { TR_FN __nv_bfloat16 of(float v) { return __float2bfloat16_rn(v); } };

// ---------------------------------------------------------------- decode
TR_FN unsigned hash(unsigned state) { return state * TRELLIS_MULTIPLIER + TRELLIS_INCREMENT; }

// y as a float: the dot product's result is the bit pattern of 2^23 + byte sum.
TR_FN float y_of_hash(unsigned x) {
  return __uint_as_float(__dp4a(x, 0x01010101u, TRELLIS_LIFT_BITS)) - TRELLIS_LIFT_BIAS;
}

// Contract P: unrefined(y) * scale, both products rounded.
TR_FN float weight_packed(float y, float scale) { return __fmul_rn(__fmul_rn(y, 1.0f / TRELLIS_DIVISOR), scale); }

// Contract E before its rounding to the dtype: the refined value (equal to the correctly rounded y / d), scaled.
TR_FN float weight_exact(float y, float scale) {
  const float r = 1.0f / TRELLIS_DIVISOR;
  const float q = __fmul_rn(y, r);
  return __fmul_rn(__fmaf_rn(__fmaf_rn(-q, TRELLIS_DIVISOR, y), r, q), scale);
}

// Index of the first code word of a block.
template <int K, int BT, bool INTERLEAVE>
TR_FN long long block_offset(long long row, int block, int rows, int blocks) {
  constexpr int WPB = BT * K / 32;
  return INTERLEAVE ? ((long long)(block / 2) * rows + row) * 48 + (block % 2) * WPB : (row * blocks + block) * WPB;
}

// State of weight t of the block at `ring`.
template <int K, int L, int BT> TR_FN unsigned state_at(const unsigned* ring, int t) {
  constexpr int WPB = BT * K / 32;
  const int p = (BT - 1 - t) * K;
  const int word = p >> 5;
  return __funnelshift_r(ring[word], ring[word + 1 == WPB ? 0 : word + 1], p & 31) & ((1u << L) - 1u);
}

// 32 bits of the stream in w from bit `p` on (zeros past its end).
template <int N> TR_FN unsigned window(const unsigned (&w)[N], int p) {
  const int word = p >> 5, shift = p & 31;
  if (word >= N) return 0u;
  if (word == N - 1) return w[N - 1] >> shift;
  return shift == 0 ? w[word] : __funnelshift_r(w[word], w[word + 1], shift);
}

// Hashes of consecutive windows: symbol i of a run starts at bit i*K of w. Everything is known at compile time once unrolled.
//
// A window needs a shift, a mask and a multiply-add; shift and mask share the ALU pipe while the multiply-add has
// the FMA pipe. With H_i the 32 bits from i*K on, state_i = H_i - 2^L H_{i+L/K} mod 2^32, so with
// Q_i = H_i*A + C, C*(1 - 2^L) = B: hash_i = Q_i - 2^L Q_{i+L/K}. The mask becomes a multiply-add.
__device__ constexpr unsigned inverse(unsigned a) {
  unsigned r = a;
  for (int i = 0; i < 5; ++i) r *= 2u - a * r;
  return r;
}

template <int K, int L, bool EXACT> struct Run {
  static constexpr bool CAN = (EXACT ? TRELLIS_LINEAR : TRELLIS_LINEAR_TF32) != 0 && L % K == 0;
  static constexpr int N = L / K;
  static constexpr unsigned C = TRELLIS_INCREMENT * inverse(1u - (1u << L));

  // The residue classes mod N that take the second multiply-add: half of them, or a third of three.
  static constexpr int MODE = EXACT ? TRELLIS_LINEAR : TRELLIS_LINEAR_TF32;
  TR_FN constexpr bool linear(int i) { return CAN && (MODE == 2 ? i % N == 1 : N % 2 == 0 ? i % 2 == 1 : i % N < N / 2); }
  template <int W> TR_FN unsigned q(const unsigned (&w)[W], int i) { return window<W>(w, i * K) * TRELLIS_MULTIPLIER + C; }
  template <int W> TR_FN unsigned at(const unsigned (&w)[W], int i) {
    if (linear(i)) {
      unsigned r;
      asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(q(w, i + N)), "n"(-(1 << L)), "r"(q(w, i)));
      return r;
    }
    return hash(window<W>(w, i * K) & ((1u << L) - 1u));
  }
};

// ---------------------------------------------------------------- tiles of 128 columns
// A tile is 4*K consecutive words of a row: half a block of 256, or one or more whole shorter blocks. Position q = 0..127
// counts symbols from the lowest bit; BT is 32, 64, 128 or 256.
template <int BT> TR_FN constexpr int tile_column(int q) { return BT == 256 ? 127 - q : q / BT * BT + BT - 1 - q % BT; }
// First column of a tile: the lower half of a ring holds the higher columns.
template <int BT> TR_FN constexpr int tile_base(int tile) { return (BT == 256 ? tile ^ 1 : tile) * 128; }
// The word that follows word `word` of the tile in its ring; 4*K stands for the first word of the block's other half.
template <int K, int BT> TR_FN constexpr int word_after(int word, int by) {
  return BT == 256 ? word + by : word / (BT * K / 32) * (BT * K / 32) + (word % (BT * K / 32) + by) % (BT * K / 32);
}

// ---------------------------------------------------------------- copies
TR_FN unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
TR_FN void copy16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
TR_FN void copy4(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
TR_FN void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> TR_FN void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Copies one warp's tiles, 16 rows at a time, to shared memory: 4*K words of a row and, where the ring goes on in the other half of a
// block of 256, 4 more words from there. A staged row takes RS words. Codes that are a view of a larger array may start anywhere; those
// are copied word by word.
template <int K, int BT, int R, int ROW_WORDS, int RS> struct Fetch {
  static constexpr bool EXTRA = BT == 256;
  static constexpr int LANES = K == 1 || K == 2 ? 2 : 4;        // lanes of a row
  static constexpr bool ROUND = EXTRA && K % 2 == 0;            // the four more words take a round of their own
  static constexpr int STAGE_BYTES = 16 * RS * 4;
  const unsigned* from;
  const unsigned* more;
  unsigned to;
  int row;
  bool wide;  // the codes start at a multiple of 16 bytes

  // `tile` points at the tile's block in row 0, `half` is which half of it (or the first or second 128 columns of 256).
  __device__ __forceinline__ Fetch(const unsigned* tile, int half, int step, unsigned ring, int lane) {
    const int at = lane % LANES;
    row = step * 16 + lane / LANES;
    from = tile + (long long)row * ROW_WORDS + (at < K ? half * (4 * K) + at * 4 : (half ^ 1) * (4 * K));
    more = tile + (long long)(step * 16 + lane % 16) * ROW_WORDS + (half ^ 1) * (4 * K);
    to = ring + lane / LANES * (RS * 4) + at * 16;
    wide = (reinterpret_cast<unsigned long long>(tile) & 15) == 0;
  }
  __device__ __forceinline__ void copy(unsigned to, const unsigned* from) {
    if (wide) {
      copy16(to, from);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) copy4(to + i * 4, from + i);
    }
  }
  __device__ __forceinline__ void next(int slot, int lane) {
    const unsigned at = to + slot * STAGE_BYTES;
    if (lane % LANES < K || (EXTRA && !ROUND)) {
#pragma unroll
      for (int r = 0; r < 16; r += 32 / LANES)
        if (R % 16 == 0 || row + r < R) copy(at + r * (RS * 4), from + r * ROW_WORDS);
    }
    if (ROUND && lane < 16 && (R % 16 == 0 || row + lane - lane / LANES < R))
      copy(at + (lane - lane / LANES) * (RS * 4) + (K - lane % LANES) * 16, more);
    from += 16 * ROW_WORDS;
    more += 16 * ROW_WORDS;
    row += 16;
  }
};

// The K words of a run of 32 symbols.
template <int K> TR_FN void load_words(unsigned (&w)[K + 1], const unsigned* p) {
  if constexpr (K == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
  } else if constexpr (K == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    w[0] = v.x; w[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < K; ++i) w[i] = p[i];
  }
}

// ---------------------------------------------------------------- tensor cores
// Both policies give a lane the same elements: A (row g, k t), (g+8, t), (g, t+4), (g+8, t+4); B (k t, n g), (t+4, g);
// C (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1), with g = lane/4, t = lane%4.
//
// Exact: an element of A is the hash itself, four unsigned bytes along k; B holds one signed digit of x four times, so that
// the tensor core adds up the bytes. Integers throughout.
// Tf32: an element of A is y; B is x rounded to 11 significant bits.
// MLX's kernels are no templates, so that a branch that if constexpr leaves out is still checked: each policy also takes the
// other's accumulators, and does nothing with them.
struct Exact {
  using Acc = int;
  TR_FN void mma(float (&)[4], unsigned, unsigned, unsigned, unsigned, unsigned, unsigned) {}
  TR_FN unsigned a(unsigned hash) { return hash; }
  TR_FN void mma(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};
struct Tf32 {
  using Acc = float;
  TR_FN void mma(int (&)[4], unsigned, unsigned, unsigned, unsigned, unsigned, unsigned) {}
  TR_FN unsigned a(unsigned hash) { return __float_as_uint(y_of_hash(hash)); }
  TR_FN void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};
// Half: an element of A is a pair of y in binary16 (exact), the two rows side by side along k; B is x in binary16, in two parts.
struct Half {
  using Acc = float;
  TR_FN void mma(int (&)[4], unsigned, unsigned, unsigned, unsigned, unsigned, unsigned) {}
  // The dot product gives the pattern of 1024 + byte sum in binary16; 1534 less is y, exactly.
  TR_FN unsigned a(unsigned hash0, unsigned hash1) {
#if TRELLIS_PACK_MAD
    unsigned pair;
    asm("mad.lo.u32 %0, %1, 65536, %2;" : "=r"(pair) : "r"(__dp4a(hash1, 0x01010101u, 0x6400u)), "r"(__dp4a(hash0, 0x01010101u, 0x6400u)));
#else
    const unsigned pair = __byte_perm(__dp4a(hash0, 0x01010101u, 0x6400u), __dp4a(hash1, 0x01010101u, 0x6400u), 0x5410);
#endif
    unsigned r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(0xE5FEE5FEu));
    return r;
  }
  TR_FN void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};
template <bool EXACT> struct Policy { using Type = Exact; };
template <> struct Policy<false> { using Type = Tf32; };

// Four bytes that add up to TRELLIS_BIAS: multiplied by the digits of x they give the share of the bias.
constexpr unsigned BIAS_BYTES = 0x80807F7Fu;

TR_FN float to_tf32(float v) {
  unsigned r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
  return __uint_as_float(r);
}

// ---------------------------------------------------------------- activations as digits
// A chunk of activations t shares one exponent e (of the largest |t| in the window of this pass). Every pass takes
// the elements at most SPAN binary places below the largest; what is smaller waits for the next pass, so that each element
// keeps its own precision whatever the range. Exponents are compared as the high words of doubles.
template <bool EXACT, int M> struct Digits {
  static constexpr int D = M == 1 ? 8 : 4;                 // signed base-256 digits for an activation row
  static constexpr int POINT = D == 8 ? 61 : 29;           // the element is rint(t * 2^(POINT - e)) as digits
  static constexpr int SPAN = EXACT ? (D == 8 ? 38 : 19) : 100;
};

constexpr int HIGH_INF = 0x7ff00000;
TR_FN int high_of(double t) { return __double2hiint(t) & 0x7fffffff; }
TR_FN double power_of_two(int e) { return __hiloint2double((e + 1023) << 20, 0); }
TR_FN float power_of_two_f(int e) { return __int_as_float((e + 127) << 23); }

// Digits of v, lowest first, each byte signed.
TR_FN unsigned long long digits8(long long v) {
  const unsigned long long k = 0x8080808080808080ull;
  return ((unsigned long long)v + k) ^ k;
}
TR_FN unsigned digits4(int v) { return ((unsigned)v + 0x80808080u) ^ 0x80808080u; }

}  // namespace trellis
