//! The two 8-bit float types that NCCL combines, and their conversion to and from 32 bits.

/// NCCL's numbers of the two types.
pub const FLOAT8: [i32; 2] = [E4M3, E5M2];
const E4M3: i32 = 10;
const E5M2: i32 = 11;

fn to_f32(number: i32, byte: u8) -> f32 {
    let (mantissa_bits, bias) = if number == E4M3 { (3, 7) } else { (2, 15) };
    let exponent = i32::from(byte & 0x7f) >> mantissa_bits;
    let mantissa = i32::from(byte) & ((1 << mantissa_bits) - 1);
    let fraction = mantissa as f32 / (1 << mantissa_bits) as f32;
    let size = match (number, exponent) {
        (E4M3, 15) if mantissa == 7 => f32::NAN,
        (E5M2, 31) if mantissa > 0 => f32::NAN,
        (E5M2, 31) => f32::INFINITY,
        (_, 0) => fraction * 2f32.powi(1 - bias),
        _ => (1.0 + fraction) * 2f32.powi(exponent - bias),
    };
    if byte & 0x80 == 0 { size } else { -size }
}

/// Rounds to the nearest number; if two are equally near, to the even one. A number that is too large becomes the
/// largest finite one.
fn from_f32(number: i32, value: f32) -> u8 {
    let sizes = (0..0x80u8).filter(|byte| to_f32(number, *byte).is_finite());
    let away = |byte: &u8| (f64::from(to_f32(number, *byte)) - f64::from(value.abs())).abs();
    let nearest = sizes.min_by(|a, b| away(a).total_cmp(&away(b)).then((a & 1).cmp(&(b & 1)))).unwrap_or(0);
    nearest | if value.is_sign_negative() { 0x80 } else { 0 }
}

pub fn widened(number: i32, bytes: &[u8]) -> Vec<u8> {
    bytes.iter().flat_map(|byte| to_f32(number, *byte).to_le_bytes()).collect()
}

pub fn narrowed(number: i32, bytes: &[u8]) -> Vec<u8> {
    let values = bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
    values.map(|value| from_f32(number, value)).collect()
}
