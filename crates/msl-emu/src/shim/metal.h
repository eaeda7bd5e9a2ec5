// The meaning of the Metal Shading Language's types and functions on the host.
//
// This is the only text besides the kernel in its translation unit: C headers would bring `::abs`, `::exp` and
// friends, which clash with `metal::`. What needs the operating system lives in the runner, behind the
// `msl_emu_*` functions below. Compiled with contraction off, so that `a * b + c` rounds twice unless `fma` is
// written.

struct msl_emu_position {
  unsigned x, y, z, index;
};
struct msl_emu_group {
  unsigned position[3];
  unsigned size[3];     // of this threadgroup, smaller at the edge of the grid
  unsigned nominal[3];  // of a full threadgroup
  unsigned grid[3];     // in threads
  unsigned groups[3];   // in threadgroups
};
struct msl_emu_call {
  void* slot[32];
  unsigned lane[32];  // lane of each slot, ascending
  unsigned count;
  unsigned mask;      // lanes that take part
};
extern "C" {
void msl_emu_simd(unsigned op, int line, void* slot, void (*compute)(msl_emu_call*));
void msl_emu_simdgroup_barrier(unsigned flags, int line);
void msl_emu_barrier(unsigned flags, int line);
void* msl_emu_threadgroup(unsigned id, __SIZE_TYPE__ size, __SIZE_TYPE__ align, const char* name);
void msl_emu_bad_lane(unsigned from, int named);
void msl_emu_not_uniform(unsigned lane, const char* what);
void msl_emu_atomic(void* at, unsigned size, int line, int writes);
void msl_emu_body_end(void);
unsigned msl_emu_lane(void);
void msl_emu_line(int line);
}

#ifdef __clang__
#define MSL_EMU_QUIET __attribute__((disable_sanitizer_instrumentation, noinline))
#else
#define MSL_EMU_QUIET __attribute__((no_sanitize("thread"), noinline))
#endif
#define MSL_EMU_INLINE __attribute__((always_inline)) inline
#ifdef MSL_EMU_CHECKED
// The accesses between two of these are those of a matrix load or store on that line.
#define MSL_EMU_LINE(line) msl_emu_line(line)
#else
#define MSL_EMU_LINE(line) (void)0
#endif
#ifdef MSL_EMU_SPACES
#define MSL_EMU_CONSTANT volatile
#else
#define MSL_EMU_CONSTANT
#endif

#define METAL_FUNC inline
#define __METAL_VERSION__ 310
#define __METAL__ 1
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.40282346638528859811704183484516925e+38f
#define FLT_MAX 3.40282346638528859811704183484516925e+38f
#define FLT_MIN 1.17549435082228750796873653722224568e-38f
#define FLT_EPSILON 1.1920928955078125e-7f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.693147180559945309417f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f

namespace metal {

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = __UINT64_TYPE__;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = __INT64_TYPE__;
using uint64_t = __UINT64_TYPE__;
using size_t = __SIZE_TYPE__;
using ptrdiff_t = __PTRDIFF_TYPE__;
using uintptr_t = __UINTPTR_TYPE__;
using float32_t = float;

// ---- traits ---------------------------------------------------------------------------------------------

template <class T, T V> struct integral_constant {
  static constexpr T value = V;
  using value_type = T;
  constexpr operator T() const { return V; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> using remove_cv_t = typename remove_const<T>::type;
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> using decay_t = remove_cv_t<remove_reference_t<T>>;
template <class T> inline constexpr bool is_signed_int_ =
    is_same_v<T, signed char> || is_same_v<T, short> || is_same_v<T, int> || is_same_v<T, long> ||
    is_same_v<T, long long> || (is_same_v<T, char> && char(-1) < 0);
template <class T> inline constexpr bool is_unsigned_int_ =
    is_same_v<T, unsigned char> || is_same_v<T, unsigned short> || is_same_v<T, unsigned> ||
    is_same_v<T, unsigned long> || is_same_v<T, unsigned long long> || is_same_v<T, bool> ||
    (is_same_v<T, char> && char(-1) > 0);
template <class T> inline constexpr bool is_integral_v = is_signed_int_<T> || is_unsigned_int_<T>;
template <class T> struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T> inline constexpr bool is_unsigned_v = is_unsigned_int_<T>;
template <class T> struct is_unsigned : bool_constant<is_unsigned_v<T>> {};
template <class T> struct make_unsigned { using type = T; };
template <> struct make_unsigned<signed char> { using type = unsigned char; };
template <> struct make_unsigned<char> { using type = unsigned char; };
template <> struct make_unsigned<short> { using type = unsigned short; };
template <> struct make_unsigned<int> { using type = unsigned; };
template <> struct make_unsigned<long> { using type = unsigned long; };
template <> struct make_unsigned<long long> { using type = unsigned long long; };
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> struct numeric_limits;

// ---- half and bfloat ------------------------------------------------------------------------------------
// Software conversions, round to nearest even, subnormals kept. Arithmetic between two of them rounds to them,
// as Metal's does; with a float it is done in float.

namespace emu {
MSL_EMU_INLINE constexpr unsigned bits(float x) { return __builtin_bit_cast(unsigned, x); }
MSL_EMU_INLINE constexpr float from_bits(unsigned x) { return __builtin_bit_cast(float, x); }

constexpr ushort float_to_half(float value) {
  unsigned x = bits(value);
  unsigned sign = (x >> 16) & 0x8000u;
  x &= 0x7fffffffu;
  if (x >= 0x7f800000u) {
    return ushort(sign | (x > 0x7f800000u ? 0x7e00u | ((x >> 13) & 0x3ffu) : 0x7c00u));
  }
  if (x >= 0x477ff000u) return ushort(sign | 0x7c00u);
  if (x < 0x38800000u) {
    // Subnormal or zero: adding 0.5 puts the wanted bits at the bottom, rounded by the hardware.
    unsigned r = bits(from_bits(x) + 0.5f) - 0x3f000000u;
    return ushort(sign | r);
  }
  unsigned r = x + 0xc8000fffu + ((x >> 13) & 1u);
  return ushort(sign | (r >> 13));
}
constexpr float half_to_float(ushort h) {
  unsigned sign = unsigned(h & 0x8000u) << 16;
  unsigned e = (h >> 10) & 0x1fu, m = h & 0x3ffu;
  if (e == 0) return from_bits(sign | bits(float(m) * 5.9604644775390625e-8f));
  if (e == 31) return from_bits(sign | 0x7f800000u | (m << 13) | (m ? 0x400000u : 0u));
  return from_bits(sign | ((e + 112u) << 23) | (m << 13));
}
MSL_EMU_INLINE constexpr ushort float_to_bfloat(float value) {
  unsigned x = bits(value);
  if ((x & 0x7fffffffu) > 0x7f800000u) return ushort((x >> 16) | 0x40u);
  return ushort((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
}
template <class T> inline constexpr bool is_small = false;
template <class T> inline constexpr bool is_number =
    is_integral_v<T> || is_same_v<T, float> || is_same_v<T, double> || is_small<T>;
}  // namespace emu

// Implicitly to float and nothing else, so that `c ? x : 0` has one type: that of x.
#define MSL_EMU_TO_NUMBER(value)                                                                            \
  template <class T> requires is_same_v<T, float> MSL_EMU_INLINE constexpr operator T() const {             \
    return value;                                                                                           \
  }                                                                                                         \
  template <class T> requires(is_integral_v<T>) MSL_EMU_INLINE constexpr explicit operator T() const {      \
    return T(value);                                                                                        \
  }

struct bfloat;
struct half {
  ushort bits_;
  half() = default;
  template <class T> requires(is_integral_v<T> || is_same_v<T, float> || is_same_v<T, double>)
  MSL_EMU_INLINE constexpr half(T x) : bits_(emu::float_to_half(float(x))) {}
  constexpr explicit half(bfloat x);
  MSL_EMU_TO_NUMBER(emu::half_to_float(bits_))
};
struct bfloat {
  ushort bits_;
  bfloat() = default;
  template <class T> requires(is_integral_v<T> || is_same_v<T, float> || is_same_v<T, double>)
  MSL_EMU_INLINE constexpr bfloat(T x) : bits_(emu::float_to_bfloat(float(x))) {}
  constexpr explicit bfloat(half x) : bits_(emu::float_to_bfloat(float(x))) {}
  MSL_EMU_TO_NUMBER(emu::from_bits(unsigned(bits_) << 16))
};
constexpr half::half(bfloat x) : bits_(emu::float_to_half(float(x))) {}
namespace emu {
template <> inline constexpr bool is_small<half> = true;
template <> inline constexpr bool is_small<bfloat> = true;
template <class A, class B> struct small_pair {};
template <class A> requires is_small<A> struct small_pair<A, A> { using type = A; };
template <class A, class B> requires(is_small<A> && is_integral_v<B>) struct small_pair<A, B> { using type = A; };
template <class A, class B> requires(is_small<B> && is_integral_v<A>) struct small_pair<A, B> { using type = B; };
}  // namespace emu
#define MSL_EMU_SMALL(op)                                                                                   \
  template <class A, class B>                                                                               \
  MSL_EMU_INLINE constexpr typename emu::small_pair<A, B>::type operator op(A a, B b) {                     \
    using R = typename emu::small_pair<A, B>::type;                                                         \
    return R(float(R(a)) op float(R(b)));                                                                   \
  }                                                                                                         \
  template <class A, class B> requires(emu::is_small<A> && emu::is_number<B>)                               \
  MSL_EMU_INLINE constexpr A& operator op##=(A& a, B b) {                                                   \
    return a = A(a op b);                                                                                   \
  }                                                                                                         \
  template <class A, class B>                                                                               \
  requires((emu::is_small<A> && is_same_v<B, float>) || (is_same_v<A, float> && emu::is_small<B>))          \
  MSL_EMU_INLINE constexpr float operator op(A a, B b) {                                                    \
    return float(a) op float(b);                                                                            \
  }                                                                                                         \
  template <class B> requires emu::is_small<B>                                                              \
  MSL_EMU_INLINE constexpr float& operator op##=(float& a, B b) {                                           \
    return a = a op float(b);                                                                               \
  }
MSL_EMU_SMALL(+)
MSL_EMU_SMALL(-)
MSL_EMU_SMALL(*)
MSL_EMU_SMALL(/)
#undef MSL_EMU_SMALL
#define MSL_EMU_SMALL_CMP(op)                                                                               \
  template <class A, class B>                                                                               \
  requires((emu::is_small<A> && emu::is_number<B>) || (emu::is_number<A> && emu::is_small<B>))              \
  MSL_EMU_INLINE constexpr bool operator op(A a, B b) {                                                     \
    return float(a) op float(b);                                                                            \
  }
MSL_EMU_SMALL_CMP(==)
MSL_EMU_SMALL_CMP(!=)
MSL_EMU_SMALL_CMP(<)
MSL_EMU_SMALL_CMP(>)
MSL_EMU_SMALL_CMP(<=)
MSL_EMU_SMALL_CMP(>=)
#undef MSL_EMU_SMALL_CMP
template <class A> requires emu::is_small<A> constexpr A operator-(A a) {
  a.bits_ ^= 0x8000;
  return a;
}
template <class A> requires emu::is_small<A> constexpr A operator+(A a) { return a; }
using bfloat16_t = bfloat;
using float16_t = half;

template <class T> inline constexpr bool is_floating_point_v = is_same_v<T, float> || emu::is_small<T>;
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> inline constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};

// ---- vectors --------------------------------------------------------------------------------------------

template <class T, int N> struct vec;
namespace emu {
template <class T, int N, int... I> struct swizzle {
  using value_type = T;
  static constexpr int size = sizeof...(I);
  T d_[N];
  MSL_EMU_INLINE constexpr operator vec<T, size>() const { return vec<T, size>(d_[I]...); }
  MSL_EMU_INLINE constexpr swizzle& operator=(vec<T, size> v) {
    int i = 0;
    ((d_[I] = v.at_(i++)), ...);
    return *this;
  }
};
template <class V> struct vector_of { static constexpr int size = 0; };
template <class T, int N> struct vector_of<vec<T, N>> {
  using type = T;
  static constexpr int size = N;
};
template <class T, int N, int... I> struct vector_of<swizzle<T, N, I...>> {
  using type = T;
  static constexpr int size = sizeof...(I);
};
template <class V> inline constexpr bool is_vec = vector_of<V>::size != 0;
template <class T, int N> MSL_EMU_INLINE constexpr vec<T, N> plain(vec<T, N> v) { return v; }
template <class T, int N, int... I>
MSL_EMU_INLINE constexpr vec<T, sizeof...(I)> plain(swizzle<T, N, I...> v) { return v; }
}  // namespace emu

namespace emu {
// A vector moves through memory in one access. Left to itself the optimiser splits such copies into elements,
// which is right but hides from the checked build how wide an access the kernel asked for.
template <int BYTES> struct whole;
template <> struct whole<2> { using type = __UINT16_TYPE__; };
template <> struct whole<4> { using type = __UINT32_TYPE__; };
template <> struct whole<8> { using type = __UINT64_TYPE__; };
template <> struct whole<16> { typedef __UINT64_TYPE__ type __attribute__((vector_size(16))); };
template <> struct whole<32> { typedef __UINT64_TYPE__ type __attribute__((vector_size(32))); };
}  // namespace emu
#ifdef MSL_EMU_CHECKED
namespace emu {
// Pretends to change a value in its register.
template <class W> MSL_EMU_INLINE void keep_whole(W& w) {
  if constexpr (sizeof(W) <= 8) __asm__("" : "+r"(w));
#if defined(__x86_64__)
  else __asm__("" : "+x"(w));
#elif defined(__aarch64__)
  else if constexpr (sizeof(W) == 16) __asm__("" : "+w"(w));
#endif
}
}  // namespace emu
#define MSL_EMU_VEC_COPY                                                                                    \
  MSL_EMU_INLINE vec(const vec& o) { *this = o; }                                                           \
  MSL_EMU_INLINE vec& operator=(const vec& o) {                                                             \
    using W = typename emu::whole<sizeof(vec)>::type;                                                       \
    W w = *reinterpret_cast<const W*>(&o);                                                                  \
    emu::keep_whole(w);                                                                                     \
    *reinterpret_cast<W*>(this) = w;                                                                        \
    return *this;                                                                                           \
  }
#else
#define MSL_EMU_VEC_COPY
#endif

#define MSL_EMU_VEC_COMMON(N)                                                                               \
  using value_type = T;                                                                                     \
  vec() = default;                                                                                          \
  MSL_EMU_VEC_COPY                                                                                          \
  MSL_EMU_INLINE constexpr T& operator[](size_t i) { return d_[i]; }                                        \
  MSL_EMU_INLINE constexpr const T& operator[](size_t i) const { return d_[i]; }

template <class T> struct alignas(sizeof(T) * 2) vec<T, 2> {
  union {
    struct { T x, y; };
    struct { T r, g; };
    T d_[2];
    emu::swizzle<T, 2, 0, 0> xx;
    emu::swizzle<T, 2, 0, 1> xy;
    emu::swizzle<T, 2, 1, 0> yx;
    emu::swizzle<T, 2, 1, 1> yy;
    emu::swizzle<T, 2, 0, 0, 0, 0> xxxx;
    emu::swizzle<T, 2, 0, 1, 0, 1> xyxy;
  };
  MSL_EMU_VEC_COMMON(2)
  template <class S> requires emu::is_number<S> MSL_EMU_INLINE constexpr vec(S s) : x(T(s)), y(T(s)) {}
  template <class A, class B> requires(emu::is_number<A> && emu::is_number<B>)
  MSL_EMU_INLINE constexpr vec(A a, B b) : x(T(a)), y(T(b)) {}
  template <class U> requires(!is_same_v<T, U>)
  MSL_EMU_INLINE constexpr explicit vec(vec<U, 2> v) : x(T(v.x)), y(T(v.y)) {}
  MSL_EMU_INLINE constexpr T at_(int i) const { return i == 0 ? x : y; }
};
template <class T> struct alignas(sizeof(T) * 4) vec<T, 3> {
  union {
    struct { T x, y, z; };
    struct { T r, g, b; };
    T d_[3];
    emu::swizzle<T, 3, 0, 0> xx;
    emu::swizzle<T, 3, 0, 1> xy;
    emu::swizzle<T, 3, 0, 2> xz;
    emu::swizzle<T, 3, 1, 0> yx;
    emu::swizzle<T, 3, 1, 1> yy;
    emu::swizzle<T, 3, 1, 2> yz;
    emu::swizzle<T, 3, 2, 0> zx;
    emu::swizzle<T, 3, 2, 1> zy;
    emu::swizzle<T, 3, 2, 2> zz;
    emu::swizzle<T, 3, 0, 1, 2> xyz;
    emu::swizzle<T, 3, 2, 1, 0> zyx;
    emu::swizzle<T, 3, 1, 2, 0> yzx;
    emu::swizzle<T, 3, 2, 0, 1> zxy;
    emu::swizzle<T, 3, 0, 0, 0> xxx;
    emu::swizzle<T, 3, 1, 1, 1> yyy;
    emu::swizzle<T, 3, 2, 2, 2> zzz;
  };
  MSL_EMU_VEC_COMMON(3)
  template <class S> requires emu::is_number<S> MSL_EMU_INLINE constexpr vec(S s) : x(T(s)), y(T(s)), z(T(s)) {}
  template <class A, class B, class C> requires(emu::is_number<A> && emu::is_number<B> && emu::is_number<C>)
  MSL_EMU_INLINE constexpr vec(A a, B b, C c) : x(T(a)), y(T(b)), z(T(c)) {}
  template <class C> requires emu::is_number<C>
  MSL_EMU_INLINE constexpr vec(vec<T, 2> v, C c) : x(v.x), y(v.y), z(T(c)) {}
  template <class A> requires emu::is_number<A>
  MSL_EMU_INLINE constexpr vec(A a, vec<T, 2> v) : x(T(a)), y(v.x), z(v.y) {}
  template <class U> requires(!is_same_v<T, U>)
  MSL_EMU_INLINE constexpr explicit vec(vec<U, 3> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  MSL_EMU_INLINE constexpr T at_(int i) const { return i == 0 ? x : i == 1 ? y : z; }
};
template <class T> struct alignas(sizeof(T) * 4) vec<T, 4> {
  union {
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    T d_[4];
    emu::swizzle<T, 4, 0, 0> xx;
    emu::swizzle<T, 4, 0, 1> xy;
    emu::swizzle<T, 4, 0, 2> xz;
    emu::swizzle<T, 4, 0, 3> xw;
    emu::swizzle<T, 4, 1, 0> yx;
    emu::swizzle<T, 4, 1, 1> yy;
    emu::swizzle<T, 4, 1, 2> yz;
    emu::swizzle<T, 4, 1, 3> yw;
    emu::swizzle<T, 4, 2, 0> zx;
    emu::swizzle<T, 4, 2, 1> zy;
    emu::swizzle<T, 4, 2, 2> zz;
    emu::swizzle<T, 4, 2, 3> zw;
    emu::swizzle<T, 4, 3, 0> wx;
    emu::swizzle<T, 4, 3, 1> wy;
    emu::swizzle<T, 4, 3, 2> wz;
    emu::swizzle<T, 4, 3, 3> ww;
    emu::swizzle<T, 4, 0, 1, 2> xyz;
    emu::swizzle<T, 4, 1, 2, 3> yzw;
    emu::swizzle<T, 4, 2, 1, 0> zyx;
    emu::swizzle<T, 4, 3, 2, 1> wzy;
    emu::swizzle<T, 4, 0, 1, 2, 3> xyzw;
    emu::swizzle<T, 4, 3, 2, 1, 0> wzyx;
    emu::swizzle<T, 4, 2, 3, 0, 1> zwxy;
    emu::swizzle<T, 4, 1, 0, 3, 2> yxwz;
    emu::swizzle<T, 4, 0, 0, 0, 0> xxxx;
    emu::swizzle<T, 4, 1, 1, 1, 1> yyyy;
    emu::swizzle<T, 4, 2, 2, 2, 2> zzzz;
    emu::swizzle<T, 4, 3, 3, 3, 3> wwww;
  };
  MSL_EMU_VEC_COMMON(4)
  template <class S> requires emu::is_number<S>
  MSL_EMU_INLINE constexpr vec(S s) : x(T(s)), y(T(s)), z(T(s)), w(T(s)) {}
  template <class A, class B, class C, class D>
  requires(emu::is_number<A> && emu::is_number<B> && emu::is_number<C> && emu::is_number<D>)
  MSL_EMU_INLINE constexpr vec(A a, B b, C c, D d) : x(T(a)), y(T(b)), z(T(c)), w(T(d)) {}
  MSL_EMU_INLINE constexpr vec(vec<T, 2> l, vec<T, 2> h) : x(l.x), y(l.y), z(h.x), w(h.y) {}
  template <class C, class D> requires(emu::is_number<C> && emu::is_number<D>)
  MSL_EMU_INLINE constexpr vec(vec<T, 2> l, C c, D d) : x(l.x), y(l.y), z(T(c)), w(T(d)) {}
  template <class A, class B> requires(emu::is_number<A> && emu::is_number<B>)
  MSL_EMU_INLINE constexpr vec(A a, B b, vec<T, 2> h) : x(T(a)), y(T(b)), z(h.x), w(h.y) {}
  template <class D> requires emu::is_number<D>
  MSL_EMU_INLINE constexpr vec(vec<T, 3> l, D d) : x(l.x), y(l.y), z(l.z), w(T(d)) {}
  template <class A> requires emu::is_number<A>
  MSL_EMU_INLINE constexpr vec(A a, vec<T, 3> h) : x(T(a)), y(h.x), z(h.y), w(h.z) {}
  template <class U> requires(!is_same_v<T, U>)
  MSL_EMU_INLINE constexpr explicit vec(vec<U, 4> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  MSL_EMU_INLINE constexpr T at_(int i) const { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
};
#undef MSL_EMU_VEC_COMMON

namespace emu {
template <int N, class F, class... V> MSL_EMU_INLINE constexpr auto map(F f, V... v) {
  using R = decltype(f(v.x...));
  if constexpr (N == 2) return vec<R, 2>(f(v.x...), f(v.y...));
  else if constexpr (N == 3) return vec<R, 3>(f(v.x...), f(v.y...), f(v.z...));
  else return vec<R, 4>(f(v.x...), f(v.y...), f(v.z...), f(v.w...));
}
// The vector type of an operation between a vector and a vector or scalar.
template <class A, class B> struct vec_pair {};
template <class A, class B> requires(is_vec<A> && is_vec<B> && vector_of<A>::size == vector_of<B>::size &&
                                     is_same_v<typename vector_of<A>::type, typename vector_of<B>::type>)
struct vec_pair<A, B> { using type = vec<typename vector_of<A>::type, vector_of<A>::size>; };
template <class A, class B> requires(is_vec<A> && is_number<B>)
struct vec_pair<A, B> { using type = vec<typename vector_of<A>::type, vector_of<A>::size>; };
template <class A, class B> requires(is_vec<B> && is_number<A>)
struct vec_pair<A, B> { using type = vec<typename vector_of<B>::type, vector_of<B>::size>; };
}  // namespace emu
#define MSL_EMU_VEC_OP(op)                                                                                  \
  template <class A, class B, class V = typename emu::vec_pair<A, B>::type>                                 \
  MSL_EMU_INLINE constexpr V operator op(A a, B b) {                                                        \
    using T = typename V::value_type;                                                                       \
    return V(emu::map<emu::vector_of<V>::size>([](T p, T q) { return T(p op q); }, V(a), V(b)));            \
  }                                                                                                         \
  template <class T, int N, class B, class V = typename emu::vec_pair<vec<T, N>, B>::type>                  \
  MSL_EMU_INLINE constexpr vec<T, N>& operator op##=(vec<T, N>& a, B b) {                                   \
    return a = a op b;                                                                                      \
  }
MSL_EMU_VEC_OP(+)
MSL_EMU_VEC_OP(-)
MSL_EMU_VEC_OP(*)
MSL_EMU_VEC_OP(/)
MSL_EMU_VEC_OP(%)
MSL_EMU_VEC_OP(&)
MSL_EMU_VEC_OP(|)
MSL_EMU_VEC_OP(^)
MSL_EMU_VEC_OP(<<)
MSL_EMU_VEC_OP(>>)
#undef MSL_EMU_VEC_OP
#define MSL_EMU_VEC_CMP(op)                                                                                 \
  template <class A, class B, class V = typename emu::vec_pair<A, B>::type>                                 \
  MSL_EMU_INLINE constexpr auto operator op(A a, B b) {                                                     \
    using T = typename V::value_type;                                                                       \
    return emu::map<emu::vector_of<V>::size>([](T p, T q) { return bool(p op q); }, V(a), V(b));            \
  }
MSL_EMU_VEC_CMP(==)
MSL_EMU_VEC_CMP(!=)
MSL_EMU_VEC_CMP(<)
MSL_EMU_VEC_CMP(>)
MSL_EMU_VEC_CMP(<=)
MSL_EMU_VEC_CMP(>=)
#undef MSL_EMU_VEC_CMP
#define MSL_EMU_VEC_UNARY(op)                                                                               \
  template <class A> requires emu::is_vec<A> MSL_EMU_INLINE constexpr auto operator op(A a) {               \
    using T = typename emu::vector_of<A>::type;                                                             \
    return emu::map<emu::vector_of<A>::size>([](T p) { return T(op p); }, emu::plain(a));                   \
  }
MSL_EMU_VEC_UNARY(-)
MSL_EMU_VEC_UNARY(~)
MSL_EMU_VEC_UNARY(!)
MSL_EMU_VEC_UNARY(+)
#undef MSL_EMU_VEC_UNARY

#define MSL_EMU_VEC_NAMES(T) using T##2 = vec<T, 2>; using T##3 = vec<T, 3>; using T##4 = vec<T, 4>;
MSL_EMU_VEC_NAMES(bool)
MSL_EMU_VEC_NAMES(char)
MSL_EMU_VEC_NAMES(uchar)
MSL_EMU_VEC_NAMES(short)
MSL_EMU_VEC_NAMES(ushort)
MSL_EMU_VEC_NAMES(int)
MSL_EMU_VEC_NAMES(uint)
MSL_EMU_VEC_NAMES(long)
MSL_EMU_VEC_NAMES(ulong)
MSL_EMU_VEC_NAMES(half)
MSL_EMU_VEC_NAMES(bfloat)
MSL_EMU_VEC_NAMES(float)
#undef MSL_EMU_VEC_NAMES
// Packed vectors have the alignment of their element.
template <class T, int N> struct packed_vec {
  T d_[N];
  packed_vec() = default;
  MSL_EMU_INLINE constexpr packed_vec(vec<T, N> v) {
    for (int i = 0; i < N; i++) d_[i] = v.at_(i);
  }
  MSL_EMU_INLINE constexpr operator vec<T, N>() const {
    if constexpr (N == 2) return vec<T, 2>(d_[0], d_[1]);
    else if constexpr (N == 3) return vec<T, 3>(d_[0], d_[1], d_[2]);
    else return vec<T, 4>(d_[0], d_[1], d_[2], d_[3]);
  }
  MSL_EMU_INLINE constexpr T& operator[](size_t i) { return d_[i]; }
  MSL_EMU_INLINE constexpr const T& operator[](size_t i) const { return d_[i]; }
};
#define MSL_EMU_PACKED(T)                                                                                   \
  using packed_##T##2 = packed_vec<T, 2>; using packed_##T##3 = packed_vec<T, 3>;                           \
  using packed_##T##4 = packed_vec<T, 4>;
MSL_EMU_PACKED(uchar)
MSL_EMU_PACKED(ushort)
MSL_EMU_PACKED(uint)
MSL_EMU_PACKED(int)
MSL_EMU_PACKED(half)
MSL_EMU_PACKED(float)
#undef MSL_EMU_PACKED

template <class T, size_t N> struct array {
  T d_[N];
  constexpr T& operator[](size_t i) { return d_[i]; }
  constexpr const T& operator[](size_t i) const { return d_[i]; }
  constexpr size_t size() const { return N; }
};

struct complex64_t {
  float real, imag;
  complex64_t() = default;
  constexpr complex64_t(float r, float i = 0) : real(r), imag(i) {}
  friend constexpr complex64_t operator+(complex64_t a, complex64_t b) { return {a.real + b.real, a.imag + b.imag}; }
  friend constexpr complex64_t operator-(complex64_t a, complex64_t b) { return {a.real - b.real, a.imag - b.imag}; }
  friend constexpr complex64_t operator*(complex64_t a, complex64_t b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
  }
};

template <class To, class From> MSL_EMU_INLINE constexpr To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  if constexpr (__is_trivially_copyable(To) && __is_trivially_copyable(From)) {
    return __builtin_bit_cast(To, x);
  } else {
    To r;
    __builtin_memcpy((void*)&r, (const void*)&x, sizeof(To));
    return r;
  }
}

template <> struct numeric_limits<float> {
  static constexpr float max() { return FLT_MAX; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float min() { return FLT_MIN; }
  static constexpr float epsilon() { return FLT_EPSILON; }
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float quiet_NaN() { return __builtin_nanf(""); }
};
template <> struct numeric_limits<half> {
  static constexpr half max() { return half(65504.0f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half min() { return half(6.103515625e-5f); }
  static constexpr half infinity() { return half(__builtin_inff()); }
};
template <class T> requires is_signed_int_<T> struct numeric_limits<T> {
  static constexpr T min() { return T(make_unsigned_t<T>(1) << (sizeof(T) * 8 - 1)); }
  static constexpr T lowest() { return min(); }
  static constexpr T max() { return T(~min()); }
};
template <class T> requires is_unsigned_int_<T> struct numeric_limits<T> {
  static constexpr T min() { return T(0); }
  static constexpr T lowest() { return T(0); }
  static constexpr T max() { return T(~T(0)); }
};

// ---- mathematics ----------------------------------------------------------------------------------------
// One definition each for float; half and bfloat go through float, vectors element by element. Metal's `fast`
// and `precise` variants are the same here: the best the host gives.

#define MSL_EMU_MATH1(name, expr)                                                                           \
  MSL_EMU_INLINE float name(float x) { return expr; }                                                       \
  template <class S> requires emu::is_small<S> MSL_EMU_INLINE S name(S s) { return S(name(float(s))); }     \
  template <class V> requires(emu::is_vec<V>) MSL_EMU_INLINE auto name(V v) {                               \
    using T = typename emu::vector_of<V>::type;                                                             \
    return emu::map<emu::vector_of<V>::size>([](T p) { return T(name(p)); }, emu::plain(v));                \
  }
#define MSL_EMU_MATH2(name, expr)                                                                           \
  MSL_EMU_INLINE float name(float x, float y) { return expr; }                                              \
  template <class S> requires emu::is_small<S> MSL_EMU_INLINE S name(S a, S b) {                            \
    return S(name(float(a), float(b)));                                                                     \
  }                                                                                                         \
  template <class A, class B, class V = typename emu::vec_pair<A, B>::type>                                 \
  MSL_EMU_INLINE auto name(A a, B b) {                                                                      \
    using T = typename V::value_type;                                                                       \
    return emu::map<emu::vector_of<V>::size>([](T p, T q) { return T(name(p, q)); }, V(a), V(b));           \
  }
#define MSL_EMU_MATHS(M1, M2)                                                                               \
  M1(exp, __builtin_expf(x))                                                                                \
  M1(exp2, __builtin_exp2f(x))                                                                              \
  M1(exp10, __builtin_powf(10.0f, x))                                                                       \
  M1(expm1, __builtin_expm1f(x))                                                                            \
  M1(log, __builtin_logf(x))                                                                                \
  M1(log2, __builtin_log2f(x))                                                                              \
  M1(log10, __builtin_log10f(x))                                                                            \
  M1(log1p, __builtin_log1pf(x))                                                                            \
  M1(sin, __builtin_sinf(x))                                                                                \
  M1(cos, __builtin_cosf(x))                                                                                \
  M1(tan, __builtin_tanf(x))                                                                                \
  M1(sinh, __builtin_sinhf(x))                                                                              \
  M1(cosh, __builtin_coshf(x))                                                                              \
  M1(tanh, __builtin_tanhf(x))                                                                              \
  M1(asin, __builtin_asinf(x))                                                                              \
  M1(acos, __builtin_acosf(x))                                                                              \
  M1(atan, __builtin_atanf(x))                                                                              \
  M1(asinh, __builtin_asinhf(x))                                                                            \
  M1(acosh, __builtin_acoshf(x))                                                                            \
  M1(atanh, __builtin_atanhf(x))                                                                            \
  M1(sqrt, __builtin_sqrtf(x))                                                                              \
  M1(rsqrt, 1.0f / __builtin_sqrtf(x))                                                                      \
  M1(floor, __builtin_floorf(x))                                                                            \
  M1(ceil, __builtin_ceilf(x))                                                                              \
  M1(trunc, __builtin_truncf(x))                                                                            \
  M1(round, __builtin_roundf(x))                                                                            \
  M1(rint, __builtin_rintf(x))                                                                              \
  M1(fabs, __builtin_fabsf(x))                                                                              \
  M1(fract, x - __builtin_floorf(x))                                                                        \
  M2(pow, __builtin_powf(x, y))                                                                             \
  M2(powr, __builtin_powf(x, y))                                                                            \
  M2(fmod, __builtin_fmodf(x, y))                                                                           \
  M2(atan2, __builtin_atan2f(x, y))                                                                         \
  M2(copysign, __builtin_copysignf(x, y))                                                                   \
  M2(divide, x / y)                                                                                         \
  M2(fmin, (y < x || x != x) ? y : x)                                                                       \
  M2(fmax, (x < y || x != x) ? y : x)                                                                       \
  M2(fdim, x > y ? x - y : 0.0f)                                                                            \
  M2(step, y < x ? 0.0f : 1.0f)
MSL_EMU_MATHS(MSL_EMU_MATH1, MSL_EMU_MATH2)
namespace precise {
MSL_EMU_MATHS(MSL_EMU_MATH1, MSL_EMU_MATH2)
}
namespace fast {
MSL_EMU_MATHS(MSL_EMU_MATH1, MSL_EMU_MATH2)
}

MSL_EMU_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class S> requires emu::is_small<S> MSL_EMU_INLINE S fma(S a, S b, S c) {
  // The product of two such significands is exact in double, and so is all of the sum that can matter.
  return S(float(double(float(a)) * double(float(b)) + double(float(c))));
}
template <class V> requires emu::is_vec<V> MSL_EMU_INLINE auto fma(V a, V b, V c) {
  using T = typename emu::vector_of<V>::type;
  return emu::map<emu::vector_of<V>::size>([](T p, T q, T r) { return fma(p, q, r); }, emu::plain(a),
                                           emu::plain(b), emu::plain(c));
}
template <class A> MSL_EMU_INLINE A mad(A a, A b, A c) { return a * b + c; }
namespace precise { using metal::fma; }
namespace fast { using metal::fma; }

MSL_EMU_INLINE bool isnan(float x) { return x != x; }
MSL_EMU_INLINE bool isinf(float x) { return (emu::bits(x) & 0x7fffffffu) == 0x7f800000u; }
MSL_EMU_INLINE bool isfinite(float x) { return (emu::bits(x) & 0x7f800000u) != 0x7f800000u; }
MSL_EMU_INLINE bool signbit(float x) { return emu::bits(x) >> 31; }
MSL_EMU_INLINE float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : (x != x ? 0.0f : x); }
MSL_EMU_INLINE float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
MSL_EMU_INLINE float saturate(float x) { return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }

namespace emu {
template <class A, class B> struct common { using type = decltype(true ? A() : B()); };
template <class A> struct common<A, A> { using type = A; };
template <class A, class B> requires(is_small<A> && is_integral_v<B>) struct common<A, B> { using type = A; };
template <class A, class B> requires(is_small<B> && is_integral_v<A>) struct common<A, B> { using type = B; };
template <class A, class B> requires(is_small<A> && (is_same_v<B, float>)) struct common<A, B> { using type = float; };
template <class A, class B> requires(is_small<B> && (is_same_v<A, float>)) struct common<A, B> { using type = float; };
template <class T> MSL_EMU_INLINE constexpr T lesser(T a, T b) {
  if constexpr (is_floating_point_v<T>) return (b < a || a != a) ? b : a;
  else return b < a ? b : a;
}
template <class T> MSL_EMU_INLINE constexpr T greater(T a, T b) {
  if constexpr (is_floating_point_v<T>) return (a < b || a != a) ? b : a;
  else return a < b ? b : a;
}
}  // namespace emu
#define MSL_EMU_MINMAX(name, how)                                                                           \
  template <class A, class B> requires(emu::is_number<A> && emu::is_number<B>)                              \
  MSL_EMU_INLINE constexpr auto name(A a, B b) {                                                            \
    using T = typename emu::common<A, B>::type;                                                             \
    return emu::how<T>(T(a), T(b));                                                                         \
  }                                                                                                         \
  template <class A, class B, class V = typename emu::vec_pair<A, B>::type>                                 \
  MSL_EMU_INLINE constexpr auto name(A a, B b) {                                                            \
    using T = typename V::value_type;                                                                       \
    return emu::map<emu::vector_of<V>::size>([](T p, T q) { return emu::how<T>(p, q); }, V(a), V(b));       \
  }                                                                                                         \
  template <class A, class B, class C> MSL_EMU_INLINE constexpr auto name##3(A a, B b, C c) {               \
    return name(a, name(b, c));                                                                             \
  }
MSL_EMU_MINMAX(min, lesser)
MSL_EMU_MINMAX(max, greater)
#undef MSL_EMU_MINMAX
namespace precise { using metal::max; using metal::min; }
namespace fast { using metal::max; using metal::min; }
template <class A, class B, class C> MSL_EMU_INLINE constexpr auto clamp(A x, B lo, C hi) { return min(max(x, lo), hi); }
template <class T> requires is_signed_int_<T> MSL_EMU_INLINE constexpr T abs(T x) { return x < 0 ? T(-x) : x; }
template <class T> requires is_unsigned_int_<T> MSL_EMU_INLINE constexpr T abs(T x) { return x; }
template <class T> requires is_floating_point_v<T> MSL_EMU_INLINE T abs(T x) { return fabs(x); }
template <class V> requires emu::is_vec<V> MSL_EMU_INLINE auto abs(V v) {
  using T = typename emu::vector_of<V>::type;
  return emu::map<emu::vector_of<V>::size>([](T p) { return T(abs(p)); }, emu::plain(v));
}
template <class T> MSL_EMU_INLINE T mix(T a, T b, T t) { return a + (b - a) * t; }
template <class T> requires is_integral_v<T> MSL_EMU_INLINE constexpr make_unsigned_t<T> absdiff(T a, T b) {
  return a < b ? make_unsigned_t<T>(b) - make_unsigned_t<T>(a) : make_unsigned_t<T>(a) - make_unsigned_t<T>(b);
}
template <class T> requires emu::is_number<T> MSL_EMU_INLINE constexpr T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> MSL_EMU_INLINE constexpr vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  return emu::map<N>([](T p, T q, bool r) { return r ? q : p; }, a, b, c);
}
template <class T, int N> MSL_EMU_INLINE constexpr vec<T, N> select(vec<T, N> a, vec<T, N> b, bool c) { return c ? b : a; }
template <int N> MSL_EMU_INLINE constexpr bool all(vec<bool, N> v) {
  bool r = true;
  for (int i = 0; i < N; i++) r = r && v.at_(i);
  return r;
}
template <int N> MSL_EMU_INLINE constexpr bool any(vec<bool, N> v) {
  bool r = false;
  for (int i = 0; i < N; i++) r = r || v.at_(i);
  return r;
}
MSL_EMU_INLINE constexpr bool all(bool v) { return v; }
MSL_EMU_INLINE constexpr bool any(bool v) { return v; }
template <class A, class B, class V = typename emu::vec_pair<A, B>::type> MSL_EMU_INLINE constexpr auto dot(A l, B r) {
  V a(l), b(r);
  typename V::value_type sum = a.x * b.x + a.y * b.y;
  for (int i = 2; i < emu::vector_of<V>::size; i++) sum = sum + a.at_(i) * b.at_(i);
  return sum;
}
template <class A> requires emu::is_vec<A> MSL_EMU_INLINE float length(A a) { return sqrt(dot(a, a)); }

#define MSL_EMU_INT1(name, expr)                                                                            \
  template <class T> requires is_integral_v<T> MSL_EMU_INLINE constexpr T name(T x) {                       \
    using U = make_unsigned_t<T>;                                                                           \
    constexpr int W = sizeof(T) * 8;                                                                        \
    (void)W;                                                                                                \
    return T(expr);                                                                                         \
  }                                                                                                         \
  template <class V> requires(emu::is_vec<V>) MSL_EMU_INLINE constexpr auto name(V v) {                     \
    using T = typename emu::vector_of<V>::type;                                                             \
    return emu::map<emu::vector_of<V>::size>([](T p) { return T(name(p)); }, emu::plain(v));                \
  }
MSL_EMU_INT1(popcount, __builtin_popcountll(U(x)))
MSL_EMU_INT1(clz, x == 0 ? W : __builtin_clzll(U(x)) - (64 - W))
MSL_EMU_INT1(ctz, x == 0 ? W : __builtin_ctzll(U(x)))
namespace emu {
template <class U> constexpr U reversed(U x) {
  U r = 0;
  for (unsigned i = 0; i < sizeof(U) * 8; i++) r = U(r << 1) | U((x >> i) & 1);
  return r;
}
}  // namespace emu
MSL_EMU_INT1(reverse_bits, emu::reversed<U>(U(x)))
#undef MSL_EMU_INT1
template <class T> requires is_integral_v<T> MSL_EMU_INLINE constexpr T extract_bits(T x, uint offset, uint count) {
  constexpr uint W = sizeof(T) * 8;
  if (count == 0) return T(0);
  if (count >= W) return x;
  return T(T(make_unsigned_t<T>(x) << (W - count - offset)) >> (W - count));
}
template <class T> requires is_integral_v<T>
MSL_EMU_INLINE constexpr T insert_bits(T base, T insert, uint offset, uint count) {
  using U = make_unsigned_t<T>;
  constexpr uint W = sizeof(T) * 8;
  U mask = U((count >= W ? ~U(0) : U((U(1) << count) - 1)) << offset);
  return T((U(base) & ~mask) | (U(U(insert) << offset) & mask));
}
template <class T> requires is_integral_v<T> MSL_EMU_INLINE constexpr T rotate(T x, T n) {
  using U = make_unsigned_t<T>;
  constexpr U W = sizeof(T) * 8;
  U s = U(n) & (W - 1);
  return s == 0 ? x : T(U(U(x) << s) | U(U(x) >> (W - s)));
}
MSL_EMU_INLINE constexpr uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
MSL_EMU_INLINE constexpr int mulhi(int a, int b) { return int((int64_t(a) * b) >> 32); }
MSL_EMU_INLINE constexpr uint madhi(uint a, uint b, uint c) { return mulhi(a, b) + c; }
MSL_EMU_INLINE constexpr uint madsat(uint a, uint b, uint c) {
  ulong r = ulong(a) * b + c;
  return r > 0xffffffffu ? 0xffffffffu : uint(r);
}
template <class T> requires is_unsigned_int_<T> MSL_EMU_INLINE constexpr T addsat(T a, T b) {
  T r = T(a + b);
  return r < a ? T(~T(0)) : r;
}
template <class T> requires is_unsigned_int_<T> MSL_EMU_INLINE constexpr T subsat(T a, T b) { return a < b ? T(0) : T(a - b); }

// ---- barriers and SIMD-group operations -----------------------------------------------------------------
// Each lane leaves its operands in a slot on its own stack; the last lane of the SIMD group to arrive computes
// the operation for all. `line` tells call sites apart.

enum class mem_flags : unsigned {
  mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8,
};
MSL_EMU_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(unsigned(a) | unsigned(b)); }
enum memory_order { memory_order_relaxed };

MSL_EMU_INLINE void threadgroup_barrier(mem_flags f, int line = __builtin_LINE()) { msl_emu_barrier(unsigned(f), line); }
MSL_EMU_INLINE void simdgroup_barrier(mem_flags f, int line = __builtin_LINE()) {
  msl_emu_simdgroup_barrier(unsigned(f), line);
}

namespace emu {
enum op : unsigned {
  op_shuffle = 1, op_shuffle_up, op_shuffle_down, op_shuffle_xor, op_rotate_up, op_rotate_down, op_fill_up, op_fill_down,
  op_broadcast, op_broadcast_first, op_sum, op_product, op_min, op_max, op_and, op_or, op_xor, op_all, op_any,
  op_ballot, op_inclusive_sum, op_exclusive_sum, op_first, op_load = 100, op_store, op_matmul, op_fill,
};
template <class T> struct move_slot {
  T in, fill, out;
  int arg;
};
template <class T, unsigned OP> MSL_EMU_QUIET void move(msl_emu_call* c) {
  using S = move_slot<T>;
  S* by_lane[32];
  for (unsigned i = 0; i < c->count; i++) by_lane[c->lane[i]] = (S*)c->slot[i];
  for (unsigned i = 0; i < c->count; i++) {
    S* s = (S*)c->slot[i];
    int lane = int(c->lane[i]);
    int from = s->arg;
    if constexpr (OP != op_shuffle) {
      if (s->arg != ((S*)c->slot[0])->arg) msl_emu_not_uniform(c->lane[i], "the lane or delta argument");
    }
    bool fill = false;
    if constexpr (OP == op_shuffle_up || OP == op_fill_up) from = lane - s->arg, fill = from < 0;
    if constexpr (OP == op_shuffle_down || OP == op_fill_down) from = lane + s->arg, fill = from > 31;
    if constexpr (OP == op_shuffle_xor) from = lane ^ s->arg;
    if constexpr (OP == op_rotate_up) from = (lane - s->arg) & 31;
    if constexpr (OP == op_rotate_down) from = (lane + s->arg) & 31;
    if constexpr (OP == op_fill_up) {
      if (fill) { from += 32; s->out = by_lane[from & 31]->fill; continue; }
    } else if constexpr (OP == op_fill_down) {
      if (fill) { from -= 32; s->out = by_lane[from & 31]->fill; continue; }
    } else {
      if (fill) { s->out = s->in; continue; }
    }
    if (from < 0 || from > 31 || !((c->mask >> from) & 1)) msl_emu_bad_lane(unsigned(lane), from);
    else s->out = by_lane[from]->in;
  }
}
template <unsigned OP, class T> MSL_EMU_INLINE T moved(T in, int arg, int line) {
  move_slot<T> s{in, in, in, arg};
  msl_emu_simd(OP | unsigned(sizeof(T)) << 16, line, &s, &move<T, OP>);
  return s.out;
}
template <class T> struct fold_slot {
  T in, out;
};
template <class T, unsigned OP> MSL_EMU_INLINE T folded(T a, T b) {
  if constexpr (OP == op_sum) return T(a + b);
  else if constexpr (OP == op_product) return T(a * b);
  else if constexpr (OP == op_min) return min(a, b);
  else if constexpr (OP == op_max) return max(a, b);
  else if constexpr (OP == op_and) return T(a & b);
  else if constexpr (OP == op_or) return T(a | b);
  else return T(a ^ b);
}
// Pairs at distance 1, then 2, 4, 8 and 16: Apple does not document its order, so no kernel may depend on it.
template <class T, unsigned OP> MSL_EMU_QUIET void fold(msl_emu_call* c) {
  T v[32];
  for (unsigned i = 0; i < c->count; i++) v[i] = ((fold_slot<T>*)c->slot[i])->in;
  for (unsigned d = 1; d < c->count; d *= 2) {
    for (unsigned i = 0; i + d < c->count; i += 2 * d) v[i] = folded<T, OP>(v[i], v[i + d]);
  }
  for (unsigned i = 0; i < c->count; i++) ((fold_slot<T>*)c->slot[i])->out = v[0];
}
template <class T, bool INCLUSIVE> MSL_EMU_QUIET void scan(msl_emu_call* c) {
  T sum = T(0);
  for (unsigned i = 0; i < c->count; i++) {
    auto* s = (fold_slot<T>*)c->slot[i];
    T with = i == 0 ? s->in : T(sum + s->in);
    s->out = INCLUSIVE ? with : sum;
    sum = with;
  }
}
MSL_EMU_QUIET inline void ballot(msl_emu_call* c) {
  ulong r = 0;
  for (unsigned i = 0; i < c->count; i++) {
    if (((fold_slot<ulong>*)c->slot[i])->in) r |= ulong(1) << c->lane[i];
  }
  for (unsigned i = 0; i < c->count; i++) ((fold_slot<ulong>*)c->slot[i])->out = r;
}
MSL_EMU_QUIET inline void all_of(msl_emu_call* c) {
  bool r = true;
  for (unsigned i = 0; i < c->count; i++) r = r && ((fold_slot<bool>*)c->slot[i])->in;
  for (unsigned i = 0; i < c->count; i++) ((fold_slot<bool>*)c->slot[i])->out = r;
}
MSL_EMU_QUIET inline void any_of(msl_emu_call* c) {
  bool r = false;
  for (unsigned i = 0; i < c->count; i++) r = r || ((fold_slot<bool>*)c->slot[i])->in;
  for (unsigned i = 0; i < c->count; i++) ((fold_slot<bool>*)c->slot[i])->out = r;
}
template <class T> MSL_EMU_QUIET void first(msl_emu_call* c) {
  for (unsigned i = 0; i < c->count; i++) ((fold_slot<T>*)c->slot[i])->out = ((fold_slot<T>*)c->slot[0])->in;
}
template <unsigned OP, class T> MSL_EMU_INLINE T reduced(T in, int line, void (*how)(msl_emu_call*)) {
  fold_slot<T> s{in, in};
  msl_emu_simd(OP | unsigned(sizeof(T)) << 16, line, &s, how);
  return s.out;
}
template <class T> inline constexpr bool is_value = is_number<T> || is_vec<T>;
}  // namespace emu

#define MSL_EMU_MOVE(name, op)                                                                              \
  template <class T> requires emu::is_value<T>                                                              \
  MSL_EMU_INLINE T name(T x, ushort arg, int line = __builtin_LINE()) {                                     \
    return emu::moved<emu::op>(x, arg, line);                                                               \
  }
MSL_EMU_MOVE(simd_shuffle, op_shuffle)
MSL_EMU_MOVE(simd_shuffle_up, op_shuffle_up)
MSL_EMU_MOVE(simd_shuffle_down, op_shuffle_down)
MSL_EMU_MOVE(simd_shuffle_xor, op_shuffle_xor)
MSL_EMU_MOVE(simd_shuffle_rotate_up, op_rotate_up)
MSL_EMU_MOVE(simd_shuffle_rotate_down, op_rotate_down)
MSL_EMU_MOVE(simd_broadcast, op_broadcast)
#undef MSL_EMU_MOVE
template <class T> MSL_EMU_INLINE T simd_shuffle_and_fill_up(T x, T fill, ushort d, int line = __builtin_LINE()) {
  emu::move_slot<T> s{x, fill, x, d};
  msl_emu_simd(emu::op_fill_up, line, &s, &emu::move<T, emu::op_fill_up>);
  return s.out;
}
template <class T> MSL_EMU_INLINE T simd_shuffle_and_fill_down(T x, T fill, ushort d, int line = __builtin_LINE()) {
  emu::move_slot<T> s{x, fill, x, d};
  msl_emu_simd(emu::op_fill_down, line, &s, &emu::move<T, emu::op_fill_down>);
  return s.out;
}
#define MSL_EMU_FOLD(name, op)                                                                              \
  template <class T> requires emu::is_value<T> MSL_EMU_INLINE T name(T x, int line = __builtin_LINE()) {    \
    return emu::reduced<emu::op>(x, line, &emu::fold<T, emu::op>);                                          \
  }
MSL_EMU_FOLD(simd_sum, op_sum)
MSL_EMU_FOLD(simd_product, op_product)
MSL_EMU_FOLD(simd_min, op_min)
MSL_EMU_FOLD(simd_max, op_max)
MSL_EMU_FOLD(simd_and, op_and)
MSL_EMU_FOLD(simd_or, op_or)
MSL_EMU_FOLD(simd_xor, op_xor)
#undef MSL_EMU_FOLD
template <class T> requires emu::is_value<T> MSL_EMU_INLINE T simd_broadcast_first(T x, int line = __builtin_LINE()) {
  return emu::reduced<emu::op_broadcast_first>(x, line, &emu::first<T>);
}
template <class T> MSL_EMU_INLINE T simd_prefix_inclusive_sum(T x, int line = __builtin_LINE()) {
  return emu::reduced<emu::op_inclusive_sum>(x, line, &emu::scan<T, true>);
}
template <class T> MSL_EMU_INLINE T simd_prefix_exclusive_sum(T x, int line = __builtin_LINE()) {
  return emu::reduced<emu::op_exclusive_sum>(x, line, &emu::scan<T, false>);
}
MSL_EMU_INLINE bool simd_all(bool x, int line = __builtin_LINE()) { return emu::reduced<emu::op_all>(x, line, &emu::all_of); }
MSL_EMU_INLINE bool simd_any(bool x, int line = __builtin_LINE()) { return emu::reduced<emu::op_any>(x, line, &emu::any_of); }
struct simd_vote {
  using vote_t = ulong;
  ulong v;
  constexpr explicit simd_vote(ulong x = 0) : v(x) {}
  constexpr explicit operator ulong() const { return v; }
  constexpr bool all() const { return (v & 0xffffffffu) == 0xffffffffu; }
  constexpr bool any() const { return v != 0; }
};
MSL_EMU_INLINE simd_vote simd_ballot(bool x, int line = __builtin_LINE()) {
  return simd_vote(emu::reduced<emu::op_ballot>(ulong(x), line, &emu::ballot));
}

MSL_EMU_INLINE simd_vote simd_active_threads_mask(int line = __builtin_LINE()) { return simd_ballot(true, line); }
MSL_EMU_INLINE bool simd_is_first(int line = __builtin_LINE()) {
  return __builtin_ctzll(ulong(simd_ballot(true, line))) == int(msl_emu_lane());
}

// ---- 8 x 8 matrices over a SIMD group -------------------------------------------------------------------
// Apple's layout: a lane holds columns `col` and `col + 1` of row `row`.

namespace emu {
MSL_EMU_INLINE constexpr unsigned matrix_row(unsigned lane) { return ((lane / 4) & 4) + ((lane / 2) % 4); }
MSL_EMU_INLINE constexpr unsigned matrix_col(unsigned lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }
}  // namespace emu

template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "SIMD-group matrices are 8 x 8");
  vec<T, 2> e_;
  simdgroup_matrix() = default;
  MSL_EMU_INLINE explicit simdgroup_matrix(T diagonal) {
    unsigned lane = msl_emu_lane(), row = emu::matrix_row(lane), col = emu::matrix_col(lane);
    e_ = vec<T, 2>(row == col ? diagonal : T(0), row == col + 1 ? diagonal : T(0));
  }
  MSL_EMU_INLINE vec<T, 2>& thread_elements() { return e_; }
  MSL_EMU_INLINE const vec<T, 2>& thread_elements() const { return e_; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int R, int C> MSL_EMU_INLINE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.e_ = vec<T, 2>(v, v);
  return m;
}
namespace emu {
struct where_slot {
  const void* at;
  ulong stride, x, y;
  bool transpose;
};
MSL_EMU_QUIET inline void where(msl_emu_call* c) {
  auto* a = (where_slot*)c->slot[0];
  for (unsigned i = 1; i < c->count; i++) {
    auto* b = (where_slot*)c->slot[i];
    if (a->at != b->at || a->stride != b->stride || a->x != b->x || a->y != b->y || a->transpose != b->transpose) {
      msl_emu_not_uniform(c->lane[i], "the address of a SIMD-group matrix");
    }
  }
  if (c->count != 32) msl_emu_bad_lane(c->lane[0], __builtin_ctz(~c->mask));
}
MSL_EMU_INLINE ulong offset(unsigned row, unsigned col, ulong stride, ulong x, ulong y, bool transpose) {
  return transpose ? (col + y) * stride + row + x : (row + y) * stride + col + x;
}
}  // namespace emu
template <class T, class P>
MSL_EMU_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const P* p, ulong stride = 8, ulong2 origin = ulong2(0),
                                   bool transpose = false, int line = __builtin_LINE()) {
  static_assert(is_same_v<T, P>, "simdgroup_load from a pointer of another type");
  emu::where_slot s{p, stride, origin.x, origin.y, transpose};
  msl_emu_simd(emu::op_load, line, &s, &emu::where);
  unsigned lane = msl_emu_lane(), row = emu::matrix_row(lane), col = emu::matrix_col(lane);
  MSL_EMU_LINE(line);
  m.e_.x = p[emu::offset(row, col, stride, origin.x, origin.y, transpose)];
  m.e_.y = p[emu::offset(row, col + 1, stride, origin.x, origin.y, transpose)];
  MSL_EMU_LINE(0);
}
template <class T, class P>
MSL_EMU_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, P* p, ulong stride = 8,
                                    ulong2 origin = ulong2(0), bool transpose = false, int line = __builtin_LINE()) {
  static_assert(is_same_v<T, P>, "simdgroup_store to a pointer of another type");
  emu::where_slot s{p, stride, origin.x, origin.y, transpose};
  msl_emu_simd(emu::op_store, line, &s, &emu::where);
  unsigned lane = msl_emu_lane(), row = emu::matrix_row(lane), col = emu::matrix_col(lane);
  MSL_EMU_LINE(line);
  p[emu::offset(row, col, stride, origin.x, origin.y, transpose)] = m.e_.x;
  p[emu::offset(row, col + 1, stride, origin.x, origin.y, transpose)] = m.e_.y;
  MSL_EMU_LINE(0);
}
namespace emu {
template <class A, class B, class C, class D> struct product_slot {
  vec<A, 2> a;
  vec<B, 2> b;
  vec<C, 2> c;
  vec<D, 2> d;
};
// In float, one fma per product, in ascending order of the inner index, starting from c.
template <class A, class B, class C, class D> MSL_EMU_QUIET void multiply(msl_emu_call* call) {
  if (call->count != 32) return msl_emu_bad_lane(call->lane[0], __builtin_ctz(~call->mask));
  using S = product_slot<A, B, C, D>;
  float a[8][8], b[8][8], c[8][8];
  for (unsigned l = 0; l < 32; l++) {
    S* s = (S*)call->slot[l];
    unsigned row = matrix_row(l), col = matrix_col(l);
    a[row][col] = float(s->a.x), a[row][col + 1] = float(s->a.y);
    b[row][col] = float(s->b.x), b[row][col + 1] = float(s->b.y);
    c[row][col] = float(s->c.x), c[row][col + 1] = float(s->c.y);
  }
  for (unsigned i = 0; i < 8; i++) {
    for (unsigned k = 0; k < 8; k++) {
      for (unsigned j = 0; j < 8; j++) c[i][j] = __builtin_fmaf(a[i][k], b[k][j], c[i][j]);
    }
  }
  for (unsigned l = 0; l < 32; l++) {
    S* s = (S*)call->slot[l];
    unsigned row = matrix_row(l), col = matrix_col(l);
    s->d = vec<D, 2>(D(c[row][col]), D(c[row][col + 1]));
  }
}
}  // namespace emu
template <class D, class A, class B, class C>
MSL_EMU_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                                  const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                                  int line = __builtin_LINE()) {
  emu::product_slot<A, B, C, D> s{a.e_, b.e_, c.e_, {}};
  msl_emu_simd(emu::op_matmul, line, &s, &emu::multiply<A, B, C, D>);
  d.e_ = s.d;
}
template <class D, class A, class B>
MSL_EMU_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                       const simdgroup_matrix<B, 8, 8>& b, int line = __builtin_LINE()) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), line);
}
template <class A, class B>
MSL_EMU_INLINE simdgroup_matrix<A, 8, 8> operator*(const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_matrix<A, 8, 8> d;
  simdgroup_multiply(d, a, b, 0);
  return d;
}

// ---- atomics --------------------------------------------------------------------------------------------

template <class T> struct atomic { T v_; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
#define MSL_EMU_ATOMIC(name, expr)                                                                          \
  template <class T, class U>                                                                               \
  MSL_EMU_QUIET T name(atomic<T>* at, U operand, memory_order, int line = __builtin_LINE()) {               \
    msl_emu_atomic(at, sizeof(T), line, 1);                                                                 \
    T b = T(operand), a, r;                                                                                 \
    __atomic_load(&at->v_, &a, __ATOMIC_RELAXED);                                                           \
    do {                                                                                                    \
      r = T(expr);                                                                                          \
    } while (!__atomic_compare_exchange(&at->v_, &a, &r, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));       \
    return a;                                                                                               \
  }
MSL_EMU_ATOMIC(atomic_fetch_add_explicit, a + b)
MSL_EMU_ATOMIC(atomic_fetch_sub_explicit, a - b)
MSL_EMU_ATOMIC(atomic_fetch_max_explicit, max(a, b))
MSL_EMU_ATOMIC(atomic_fetch_min_explicit, min(a, b))
MSL_EMU_ATOMIC(atomic_fetch_and_explicit, a & b)
MSL_EMU_ATOMIC(atomic_fetch_or_explicit, a | b)
MSL_EMU_ATOMIC(atomic_fetch_xor_explicit, a ^ b)
MSL_EMU_ATOMIC(atomic_exchange_explicit, b)
#undef MSL_EMU_ATOMIC
template <class T, class U>
MSL_EMU_QUIET void atomic_store_explicit(atomic<T>* at, U value, memory_order, int line = __builtin_LINE()) {
  msl_emu_atomic(at, sizeof(T), line, 1);
  T v = T(value);
  __atomic_store(&at->v_, &v, __ATOMIC_RELAXED);
}
template <class T>
MSL_EMU_QUIET T atomic_load_explicit(const atomic<T>* at, memory_order, int line = __builtin_LINE()) {
  msl_emu_atomic((void*)at, sizeof(T), line, 0);
  T v;
  __atomic_load(&at->v_, &v, __ATOMIC_RELAXED);
  return v;
}
template <class T, class U>
MSL_EMU_QUIET bool atomic_compare_exchange_weak_explicit(atomic<T>* at, T* expected, U value, memory_order, memory_order,
                                                         int line = __builtin_LINE()) {
  msl_emu_atomic(at, sizeof(T), line, 1);
  T v = T(value);
  return __atomic_compare_exchange(&at->v_, expected, &v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// ---- what MLX's own header adds -------------------------------------------------------------------------

MSL_EMU_INLINE size_t ceildiv(size_t n, size_t m) { return (n + m - 1) / m; }
template <class I = int64_t>
MSL_EMU_INLINE I elem_to_loc(I elem, const MSL_EMU_CONSTANT int* shape, const MSL_EMU_CONSTANT int64_t* strides,
                             int ndim) {
  I loc = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    loc += (elem % shape[i]) * I(strides[i]);
    elem /= shape[i];
  }
  return loc;
}

namespace emu {
template <class T> MSL_EMU_INLINE T& threadgroup_variable(unsigned id, const char* name) {
  return *(T*)msl_emu_threadgroup(id, sizeof(T), alignof(T), name);
}
}  // namespace emu
}  // namespace metal

using namespace metal;
