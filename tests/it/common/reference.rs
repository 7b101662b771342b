//! The expected results of the kernels: computed one element at a time, with no code shared with the kernels.

use sagellm::types::{Dtype, ReduceOp};

pub fn is_complex(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::C32 | Dtype::C64 | Dtype::C128)
}

pub fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64)
}

/// Returns whether torch and this project define the reduction for this dtype.
pub fn is_defined(dtype: Dtype, op: ReduceOp) -> bool {
    match op {
        ReduceOp::Sum | ReduceOp::Product => dtype != Dtype::Bytes,
        ReduceOp::Avg | ReduceOp::PremulSum(_) => !matches!(dtype, Dtype::Bytes | Dtype::Bool),
        ReduceOp::Min | ReduceOp::Max => dtype != Dtype::Bytes && !is_complex(dtype),
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => {
            dtype != Dtype::Bytes && !is_complex(dtype) && !is_float(dtype)
        }
    }
}

/// Applies `reference` to every element of the ranks' inputs.
pub fn reference_all(dtype: Dtype, op: ReduceOp, inputs: &[Vec<u8>], factors: &[f64]) -> Vec<u8> {
    let size = dtype.size();
    (0..inputs[0].len() / size)
        .flat_map(|i| {
            let elements: Vec<&[u8]> = inputs.iter().map(|input| &input[i * size..][..size]).collect();
            reference(dtype, op, &elements, factors)
        })
        .collect()
}

pub fn power_of_two(e: i32) -> f64 {
    // Builds the number from its bits, because `powi` promises no precision.
    match e {
        ..-1022 => f64::from_bits(1u64.checked_shl((e + 1074) as u32).unwrap_or(0)),
        -1022..=1023 => f64::from_bits(((e + 1023) as u64) << 52),
        _ => f64::INFINITY,
    }
}

/// Returns the value of a 16-bit binary float with `fraction` fraction bits.
pub fn decode_16(bits: u16, fraction: u32) -> f64 {
    let exponent_bits = 15 - fraction;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let exponent = ((bits & 0x7fff) >> fraction) as i32;
    let mantissa = (bits & ((1 << fraction) - 1)) as f64;
    let steps = power_of_two(-(fraction as i32));
    if exponent == (1 << exponent_bits) - 1 {
        return if mantissa == 0.0 { sign * f64::INFINITY } else { f64::NAN };
    }
    if exponent == 0 {
        sign * mantissa * steps * power_of_two(1 - bias)
    } else {
        sign * (1.0 + mantissa * steps) * power_of_two(exponent - bias)
    }
}

/// Rounds to the nearest 16-bit float, ties to even. `count` is the number in units of its last place.
fn encode_16(number: f32, fraction: u32) -> u16 {
    let exponent_bits = 15 - fraction;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let infinity = ((1u32 << exponent_bits) - 1) << fraction;
    if number.is_nan() {
        return (infinity | 1 << (fraction - 1)) as u16;
    }
    let sign = if number.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = (number as f64).abs();
    if magnitude.is_infinite() {
        return sign | infinity as u16;
    }
    let mut exponent = 1 - bias;
    while magnitude >= power_of_two(exponent + 1) {
        exponent += 1;
    }
    let count = (magnitude / power_of_two(exponent - fraction as i32)).round_ties_even() as u32;
    // For a normal number, `count` includes the leading 1, which adds 1 to the exponent field. A carry adds 1 as well.
    let bits = (((exponent - (1 - bias)) as u32) << fraction) + count;
    sign | bits.min(infinity) as u16
}

fn canonical_f32(x: f32) -> [u8; 4] {
    if x.is_nan() { 0x7fc0_0000u32.to_le_bytes() } else { x.to_le_bytes() }
}

fn canonical_f64(x: f64) -> [u8; 8] {
    if x.is_nan() { 0x7ff8_0000_0000_0000u64.to_le_bytes() } else { x.to_le_bytes() }
}

macro_rules! reference_float {
    ($name:ident, $product:ident, $type:ty) => {
        fn $name(op: ReduceOp, values: &[$type], factors: &[f64]) -> $type {
            let nan = values.iter().any(|v| v.is_nan());
            let mut result = match op {
                ReduceOp::PremulSum(_) => values[0] * factors[0] as $type,
                _ => values[0],
            };
            for (rank, &value) in values.iter().enumerate().skip(1) {
                result = match op {
                    ReduceOp::Sum | ReduceOp::Avg => result + value,
                    ReduceOp::PremulSum(_) => result + value * factors[rank] as $type,
                    ReduceOp::Product => result * value,
                    _ if nan => <$type>::NAN,
                    ReduceOp::Min => {
                        if value.total_cmp(&result).is_lt() {
                            value
                        } else {
                            result
                        }
                    }
                    ReduceOp::Max => {
                        if value.total_cmp(&result).is_gt() {
                            value
                        } else {
                            result
                        }
                    }
                    _ => unreachable!("not a float operation"),
                };
            }
            if op == ReduceOp::Avg { result / values.len() as $type } else { result }
        }

        fn $product(values: &[[$type; 2]]) -> [$type; 2] {
            let mut result = values[0];
            for value in &values[1..] {
                let real = result[0] * value[0] - result[1] * value[1];
                let imaginary = result[0] * value[1] + result[1] * value[0];
                result = [real, imaginary];
            }
            result
        }
    };
}
reference_float!(reference_f32, product_f32, f32);
reference_float!(reference_f64, product_f64, f64);

/// Computes in 128 bits and truncates to the element's width at the end. For AVG, it also truncates before the
/// division.
fn reference_int(dtype: Dtype, op: ReduceOp, elements: &[&[u8]], factors: &[f64]) -> Vec<u8> {
    let size = dtype.size();
    let signed = matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
    let extend = |bytes: &[u8]| -> i128 {
        let fill = if signed && bytes[size - 1] >= 0x80 { 0xff } else { 0 };
        let mut wide = [fill; 16];
        wide[..size].copy_from_slice(&bytes[..size]);
        i128::from_le_bytes(wide)
    };
    let values: Vec<i128> = elements.iter().map(|e| extend(e)).collect();
    let scaled = |rank: usize| values[rank].wrapping_mul(factors[rank] as i128);
    let mut result = if matches!(op, ReduceOp::PremulSum(_)) { scaled(0) } else { values[0] };
    for (rank, &value) in values.iter().enumerate().skip(1) {
        result = match op {
            ReduceOp::Sum | ReduceOp::Avg => result.wrapping_add(value),
            ReduceOp::PremulSum(_) => result.wrapping_add(scaled(rank)),
            ReduceOp::Product => result.wrapping_mul(value),
            ReduceOp::Min => result.min(value),
            ReduceOp::Max => result.max(value),
            ReduceOp::Band => result & value,
            ReduceOp::Bor => result | value,
            ReduceOp::Bxor => result ^ value,
        };
    }
    if op == ReduceOp::Avg {
        result = extend(&result.to_le_bytes()[..size]) / values.len() as i128;
    }
    result.to_le_bytes()[..size].to_vec()
}

fn reference_bool(op: ReduceOp, elements: &[&[u8]]) -> Vec<u8> {
    let truths = || elements.iter().map(|e| e[0] != 0);
    let result = match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => truths().any(|t| t),
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => truths().all(|t| t),
        ReduceOp::Bxor => truths().filter(|t| *t).count() % 2 == 1,
        _ => unreachable!("not a bool operation"),
    };
    vec![result as u8]
}

fn f32_of(dtype: Dtype, bytes: &[u8]) -> f32 {
    match dtype {
        Dtype::F16 => decode_16(u16::from_le_bytes([bytes[0], bytes[1]]), 10) as f32,
        Dtype::Bf16 => decode_16(u16::from_le_bytes([bytes[0], bytes[1]]), 7) as f32,
        _ => f32::from_le_bytes(bytes[..4].try_into().unwrap()),
    }
}

pub fn bytes_of(dtype: Dtype, number: f32) -> Vec<u8> {
    match dtype {
        Dtype::F16 => encode_16(number, 10).to_le_bytes().to_vec(),
        Dtype::Bf16 => encode_16(number, 7).to_le_bytes().to_vec(),
        _ => canonical_f32(number).to_vec(),
    }
}

/// Returns one element of the result, computed from that element of every rank.
fn reference(dtype: Dtype, op: ReduceOp, elements: &[&[u8]], factors: &[f64]) -> Vec<u8> {
    if elements.len() == 1 && !matches!(op, ReduceOp::PremulSum(_)) {
        return elements[0].to_vec();
    }
    match dtype {
        Dtype::Bool => reference_bool(op, elements),
        Dtype::F64 => {
            let values: Vec<f64> = elements.iter().map(|e| f64::from_le_bytes((*e).try_into().unwrap())).collect();
            canonical_f64(reference_f64(op, &values, factors)).to_vec()
        }
        Dtype::F16 | Dtype::Bf16 | Dtype::F32 => {
            let values: Vec<f32> = elements.iter().map(|e| f32_of(dtype, e)).collect();
            bytes_of(dtype, reference_f32(op, &values, factors))
        }
        Dtype::C32 | Dtype::C64 | Dtype::C128 => reference_complex(dtype, op, elements, factors),
        _ => reference_int(dtype, op, elements, factors),
    }
}

fn reference_complex(dtype: Dtype, op: ReduceOp, elements: &[&[u8]], factors: &[f64]) -> Vec<u8> {
    let part = match dtype {
        Dtype::C32 => Dtype::F16,
        Dtype::C64 => Dtype::F32,
        _ => Dtype::F64,
    };
    let parts: Vec<(&[u8], &[u8])> = elements.iter().map(|e| e.split_at(part.size())).collect();
    if op != ReduceOp::Product {
        let real: Vec<&[u8]> = parts.iter().map(|p| p.0).collect();
        let imaginary: Vec<&[u8]> = parts.iter().map(|p| p.1).collect();
        return [reference(part, op, &real, factors), reference(part, op, &imaginary, factors)].concat();
    }
    if part == Dtype::F64 {
        let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap());
        let values: Vec<[f64; 2]> = parts.iter().map(|p| [number(p.0), number(p.1)]).collect();
        return product_f64(&values).map(canonical_f64).concat();
    }
    let values: Vec<[f32; 2]> = parts.iter().map(|p| [f32_of(part, p.0), f32_of(part, p.1)]).collect();
    product_f32(&values).map(|number| bytes_of(part, number)).concat()
}
