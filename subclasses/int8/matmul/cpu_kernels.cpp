// Products with int8 matrices on x86 processors. A matrix q of N by K numbers is read as int8, converted in registers,
// and each converted vector is multiplied by several rows of the other operand. All matrices are contiguous, N and K are
// multiples of 32. Compiled for the processor that runs it, with AVX-512 or AVX2 (`cpu_kernels.py`).

#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// ---- vectors -------------------------------------------------------------------------------------------------------

#ifdef __AVX512F__
using Float = __m512;
using Int = __m512i;
constexpr int LANES = 16;
// A tile of ROWS x COLUMNS sums, with the operands of one step, fills the registers.
constexpr int ROWS = 4, COLUMNS = 6, ROWS_T = 6;
inline Float widen(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline Float load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
inline Float spread(float v) { return _mm512_set1_ps(v); }
inline Float multiply_add(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
inline Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
inline Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
inline void narrow(uint16_t* p, Float v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16))); }
inline float sum(Float v) { return _mm512_reduce_add_ps(v); }
inline int32_t sum(Int v) { return _mm512_reduce_add_epi32(v); }
#else
using Float = __m256;
using Int = __m256i;
constexpr int LANES = 8;
constexpr int ROWS = 2, COLUMNS = 4, ROWS_T = 2;
inline Float widen(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline Float load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
inline Float spread(float v) { return _mm256_set1_ps(v); }
inline Float multiply_add(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
inline Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
inline Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
inline void narrow(uint16_t* p, Float v) {
  Int high = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}
template <class T, class V>
inline T sum_lanes(V v) {
  T lanes[LANES], total = 0;
  std::memcpy(lanes, &v, sizeof v);
  for (T lane : lanes) total += lane;
  return total;
}
inline float sum(Float v) { return sum_lanes<float>(v); }
inline int32_t sum(Int v) { return sum_lanes<int32_t>(v); }
#endif

// ---- what one step of a product does -------------------------------------------------------------------------------

// Each has: X, an entry of the other operand; STEP, the entries of q in one step; PAIR, of how many rows of q a step of
// `columns` takes entries; loading of both operands; the addition of their products to a vector of sums.

struct FromFloat {
  using X = float;
  using Sums = Float;
  static constexpr int STEP = LANES, PAIR = 1;
  static Float of_q(const int8_t* q) { return widen(q); }
  static Float of_q_rows(const int8_t* q, int64_t) { return widen(q); }
  static Float of_x(const X* x) { return load(x); }
  static Float spread_x(const X* x) { return spread(*x); }
  static Float add_products(Float sums, Float x, Float w) { return multiply_add(x, w, sums); }
};

#ifdef __AVX512BF16__
struct FromBFloat16 {  // sums are in float32
  using X = uint16_t;
  using Sums = Float;
  static constexpr int STEP = 2 * LANES, PAIR = 2;
  static __m512bh of_q(const int8_t* q) { return _mm512_cvtne2ps_pbh(widen(q + LANES), widen(q)); }
  static __m512bh of_q_rows(const int8_t* q, int64_t width) {  // one entry of the first row, one of the second, ...
    Int first = _mm512_castps_si512(widen(q)), second = _mm512_castps_si512(widen(q + width));
    return (__m512bh)_mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(first, 16), second);
  }
  static __m512bh of_x(const X* x) { return (__m512bh)_mm512_loadu_si512(x); }
  static __m512bh spread_x(const X* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Float add_products(Float sums, __m512bh x, __m512bh w) { return _mm512_dpbf16_ps(sums, x, w); }
};
#endif

struct FromInt8 {  // sums are exact
  using X = int8_t;
  using Sums = Int;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  static constexpr int STEP = 64;
  static constexpr int SHIFT = 128;  // the instruction takes an unsigned operand: q + SHIFT
  static Int of_q(const int8_t* q) { return _mm512_xor_si512(_mm512_loadu_si512(q), _mm512_set1_epi8(-128)); }
  static Int of_x(const X* x) { return _mm512_loadu_si512(x); }
  static Int add_products(Int sums, Int x, Int w) { return _mm512_dpbusd_epi32(sums, w, x); }
#elif defined(__AVX512BW__)
  static constexpr int STEP = 32, SHIFT = 0;
  static Int of_q(const int8_t* q) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)q)); }
  static Int of_x(const X* x) { return of_q(x); }
  static Int add_products(Int sums, Int x, Int w) { return add(sums, _mm512_madd_epi16(x, w)); }
#else
  static constexpr int STEP = 16, SHIFT = 0;
  static Int of_q(const int8_t* q) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)q)); }
  static Int of_x(const X* x) { return of_q(x); }
  static Int add_products(Int sums, Int x, Int w) { return add(sums, _mm256_madd_epi16(x, w)); }
#endif
};

// ---- x @ q.T -------------------------------------------------------------------------------------------------------

template <class Op, int M, int N, class Finish>
void tile(const typename Op::X* x, const int8_t* q, int64_t width, const Finish& finish) {
  typename Op::Sums sums[M][N] = {};
  for (int64_t k = 0; k < width; k += Op::STEP) {
    decltype(Op::of_q(q)) w[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) w[n] = Op::of_q(q + n * width + k);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      auto row = Op::of_x(x + m * width + k);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sums[m][n] = Op::add_products(sums[m][n], row, w[n]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) finish(m, n, sum(sums[m][n]));
}

// Calls tiles of `ROWS` rows of x, then one of those that remain.
template <class Op, int N, int M = ROWS, class Finish>
void all_rows(const typename Op::X* x, const int8_t* q, int64_t first, int64_t rows, int64_t width, const Finish& finish) {
  for (; first + M <= rows; first += M)
    tile<Op, M, N>(x + first * width, q, width, [&](int m, int n, auto sum) { finish(first + m, n, sum); });
  if constexpr (M > 1) all_rows<Op, N, M - 1>(x, q, first, rows, width, finish);
}

// One row takes the time of reading q: fastest row after row, with sums that do not wait for one another.
template <class Op>
auto one_row(const typename Op::X* x, const int8_t* q, int64_t width) {
  constexpr int SUMS = 4;
  typename Op::Sums sums[SUMS] = {};
  int64_t k = 0;
  for (; k + SUMS * Op::STEP <= width; k += SUMS * Op::STEP)
#pragma GCC unroll 8
    for (int n = 0; n < SUMS; n++) {
      int64_t at = k + n * Op::STEP;
      sums[n] = Op::add_products(sums[n], Op::of_x(x + at), Op::of_q(q + at));
    }
  for (; k < width; k += Op::STEP) sums[0] = Op::add_products(sums[0], Op::of_x(x + k), Op::of_q(q + k));
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

constexpr int64_t BLOCK = 32;  // rows of x that stay in the cache while q goes by

template <class Op, class Finish>
void multiply_rows(const typename Op::X* x, const int8_t* q, int64_t rows, int64_t height, int64_t width, int threads, const Finish& finish) {
  if (rows == 1) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < height; n++) finish(0, n, one_row<Op>(x, q + n * width, width));
    return;
  }
  int64_t groups = (height + COLUMNS - 1) / COLUMNS;
#pragma omp parallel num_threads(threads)
  for (int64_t start = 0; start < rows; start += BLOCK) {
    int64_t end = std::min(rows, start + BLOCK);
#pragma omp for schedule(static) nowait
    for (int64_t group = 0; group < groups; group++) {
      int64_t first = group * COLUMNS;
      auto write = [&](int64_t m, int64_t n, auto sum) { finish(m, first + n, sum); };
      if (first + COLUMNS <= height) all_rows<Op, COLUMNS>(x, q + first * width, start, end, width, write);
      else
        for (; first < height; first++) all_rows<Op, 1>(x, q + first * width, start, end, width, write);
    }
  }
}

// ---- x @ q ---------------------------------------------------------------------------------------------------------

constexpr int VECTORS = 4;        // of sums beside each other
constexpr int64_t Q_ROWS = 16;    // rows of q that are read at a time: a processor prefetches about so many streams

// x is packed: [height / PAIR, rows, PAIR].
template <class Op, int M, int N>
void tile_t(const typename Op::X* x, int64_t rows, const int8_t* q, int64_t height, int64_t width, float* y, bool first) {
  Float sums[M][N] = {};
  for (int64_t k = 0; k < height; k += Op::PAIR, x += rows * Op::PAIR, q += width * Op::PAIR) {
    decltype(Op::of_q(q)) w[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) w[n] = Op::of_q_rows(q + n * LANES, width);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      auto entry = Op::spread_x(x + m * Op::PAIR);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sums[m][n] = Op::add_products(sums[m][n], entry, w[n]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      float* to = y + m * width + n * LANES;
      store(to, first ? sums[m][n] : add(load(to), sums[m][n]));
    }
}

template <class Op, int N, int M = ROWS_T>
void all_rows_t(const typename Op::X* x, int64_t start, int64_t rows, const int8_t* q, int64_t height, int64_t width, float* y, bool first) {
  for (; start + M <= rows; start += M)
    tile_t<Op, M, N>(x + start * Op::PAIR, rows, q, height, width, y + start * width, first);
  if constexpr (M > 1) all_rows_t<Op, N, M - 1>(x, start, rows, q, height, width, y, first);
}

template <class Op>
void multiply_columns(const typename Op::X* x, const int8_t* q, float* y, int64_t rows, int64_t height, int64_t width, int threads) {
  constexpr int64_t UNIT = 32, TILE = VECTORS * LANES;
  int64_t units = width / UNIT;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int part = 0; part < threads; part++) {
    int64_t from = units * part / threads * UNIT, to = units * (part + 1) / threads * UNIT;
    for (int64_t start = 0; start < height; start += Q_ROWS) {
      int64_t count = std::min(Q_ROWS, height - start), column = from;
      const typename Op::X* entries = x + start * rows;
      const int8_t* block = q + start * width;
      for (; column + TILE <= to; column += TILE)
        all_rows_t<Op, VECTORS>(entries, 0, rows, block + column, count, width, y + column, start == 0);
      for (; column < to; column += UNIT)
        all_rows_t<Op, UNIT / LANES>(entries, 0, rows, block + column, count, width, y + column, start == 0);
    }
  }
}

// Each int8 number is a bfloat16 number: the upper half of a float32 number.
void convert(const int8_t* q, int64_t stride, uint16_t* y, int64_t height, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < height; row++)
    for (int64_t k = 0; k < width; k += LANES) narrow(y + row * width + k, widen(q + row * stride + k));
}

// ---- floats to int8 and back -----------------------------------------------------------------------------------------

// By the bits of a number: their order is that of magnitudes, and those of NaN are the greatest.

struct Float32 {
  using Bits = uint32_t;
  static constexpr Bits MAGNITUDE = 0x7fffffff;
  static float widen(Bits bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static Bits narrow(float value) {
    Bits bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
  }
};

struct BFloat16 {
  using Bits = uint16_t;
  static constexpr Bits MAGNITUDE = 0x7fff;
  static float widen(Bits bits) { return Float32::widen(uint32_t(bits) << 16); }
  static Bits narrow(float value) {  // to the nearest, a tie to the even one
    uint32_t bits = Float32::narrow(value);
    if ((bits & Float32::MAGNITUDE) > 0x7f800000) return 0x7fc0;  // NaN
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
};

// Quantizes a row as affine.py does: the scale is rounded to the dtype of the row.
template <class F>
float quantize(const typename F::Bits* x, int8_t* q, int64_t width) {
  typename F::Bits most = 0;
  for (int64_t k = 0; k < width; k++) {
    typename F::Bits magnitude = x[k] & F::MAGNITUDE;
    most = magnitude > most ? magnitude : most;
  }
  float scale = F::widen(F::narrow(F::widen(most) / 127.5f));
  if (scale < FLT_MIN) scale = FLT_MIN;
  for (int64_t k = 0; k < width; k++) {
    float value = std::rint(F::widen(x[k]) / scale);
    value = value < -128 ? -128 : value;
    value = value > 127 ? 127 : value;
    q[k] = (int8_t)(int32_t)value;
  }
  return scale;
}

template <class F>
void quantize_rows(const typename F::Bits* x, int8_t* q, float* scales, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t m = 0; m < rows; m++) scales[m] = quantize<F>(x + m * width, q + m * width, width);
}

// Scales and transposes sums of height by rows. `step` of the scales of columns is 0 where one is for all.
template <class F>
void scale_sums(const int32_t* sums, const float* row_scales, const float* scales, int64_t step, typename F::Bits* y, int64_t rows, int64_t height, int threads) {
  constexpr int64_t COLUMNS_AT_A_TIME = 32;  // whose lines stay in the cache while the rows go by
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t start = 0; start < height; start += COLUMNS_AT_A_TIME) {
    int64_t end = std::min(height, start + COLUMNS_AT_A_TIME);
    for (int64_t m = 0; m < rows; m++)
      for (int64_t n = start; n < end; n++)
        y[m * height + n] = F::narrow((float)sums[n * rows + m] * row_scales[m] * scales[n * step]);
  }
}

// What the shift of q adds to the sums of each row of x.
std::vector<int32_t> shifts_of(const int8_t* x, int64_t rows, int64_t width) {
  std::vector<int32_t> shifts(rows);
  for (int64_t m = 0; m < rows; m++)
    for (int64_t k = 0; k < width; k++) shifts[m] += FromInt8::SHIFT * x[m * width + k];
  return shifts;
}

template <class F>
void dynamic_rows(const typename F::Bits* x, const int8_t* q, typename F::Bits* y, const float* scales, int64_t step, int64_t rows, int64_t height, int64_t width, int threads) {
  std::vector<int8_t> numbers(rows * width);
  std::vector<float> row_scales(rows);
  quantize_rows<F>(x, numbers.data(), row_scales.data(), rows, width, (int)std::min<int64_t>(rows, threads));
  std::vector<int32_t> shifts = shifts_of(numbers.data(), rows, width);
  multiply_rows<FromInt8>(numbers.data(), q, rows, height, width, threads, [&](int64_t m, int64_t n, int32_t sum) {
    y[m * height + n] = F::narrow((float)(sum - shifts[m]) * row_scales[m] * scales[n * step]);
  });
}

}  // namespace

// ---- what Python calls ---------------------------------------------------------------------------------------------

extern "C" {

void rows_float32(const float* x, const int8_t* q, float* y, int64_t rows, int64_t height, int64_t width, int threads) {
  multiply_rows<FromFloat>(x, q, rows, height, width, threads, [&](int64_t m, int64_t n, float sum) { y[m * height + n] = sum; });
}

void columns_float32(const float* x, const int8_t* q, float* y, int64_t rows, int64_t height, int64_t width, int threads) {
  multiply_columns<FromFloat>(x, q, y, rows, height, width, threads);
}

#ifdef __AVX512BF16__
void rows_bfloat16(const uint16_t* x, const int8_t* q, float* y, int64_t rows, int64_t height, int64_t width, int threads) {
  multiply_rows<FromBFloat16>(x, q, rows, height, width, threads, [&](int64_t m, int64_t n, float sum) { y[m * height + n] = sum; });
}

void columns_bfloat16(const uint16_t* x, const int8_t* q, float* y, int64_t rows, int64_t height, int64_t width, int threads) {
  multiply_columns<FromBFloat16>(x, q, y, rows, height, width, threads);
}
#endif

void convert_bfloat16(const int8_t* q, int64_t stride, uint16_t* y, int64_t height, int64_t width, int threads) {
  convert(q, stride, y, height, width, threads);
}

void rows_int8(const int8_t* x, const int8_t* q, int32_t* y, int64_t rows, int64_t height, int64_t width, int threads) {
  std::vector<int32_t> shifts = shifts_of(x, rows, width);
  multiply_rows<FromInt8>(x, q, rows, height, width, threads, [&](int64_t m, int64_t n, int32_t sum) { y[m * height + n] = sum - shifts[m]; });
}

void dynamic_float32(const Float32::Bits* x, const int8_t* q, Float32::Bits* y, const float* scales, int64_t step, int64_t rows, int64_t height, int64_t width, int threads) {
  dynamic_rows<Float32>(x, q, y, scales, step, rows, height, width, threads);
}

void quantize_float32(const Float32::Bits* x, int8_t* q, float* scales, int64_t rows, int64_t width, int threads) {
  quantize_rows<Float32>(x, q, scales, rows, width, threads);
}

void scale_float32(const int32_t* sums, const float* row_scales, const float* scales, int64_t step, Float32::Bits* y, int64_t rows, int64_t height, int threads) {
  scale_sums<Float32>(sums, row_scales, scales, step, y, rows, height, threads);
}

void dynamic_bfloat16(const BFloat16::Bits* x, const int8_t* q, BFloat16::Bits* y, const float* scales, int64_t step, int64_t rows, int64_t height, int64_t width, int threads) {
  dynamic_rows<BFloat16>(x, q, y, scales, step, rows, height, width, threads);
}

void quantize_bfloat16(const BFloat16::Bits* x, int8_t* q, float* scales, int64_t rows, int64_t width, int threads) {
  quantize_rows<BFloat16>(x, q, scales, rows, width, threads);
}

void scale_bfloat16(const int32_t* sums, const float* row_scales, const float* scales, int64_t step, BFloat16::Bits* y, int64_t rows, int64_t height, int threads) {
  scale_sums<BFloat16>(sums, row_scales, scales, step, y, rows, height, threads);
}

}  // extern "C"
