//! Dense layers of integers: with quantized tokens to the bit, with floats within their rounding.

use half::f16;
use twofour::{Arithmetic, MatrixRef, kernel::quantize};
use twofour_cuda::{
    DataType, Error,
    layer::{DeviceBuffer, LayerContext},
};
use twofour_transformer::cuda::decode::{DenseInt8Linear, WeightOnlyLinear};

use crate::{
    Check, for_each_type,
    reference::{expect_close, numbers},
    up,
};

/// Integers of the whole range, from `least` to `-least - 1`.
fn integers(len: usize, least: i32, seed: usize) -> Vec<i8> {
    (0..len).map(|i| (least + ((i * 7919 + i / 13 * 31 + seed) as i32).rem_euclid(-2 * least)) as i8).collect()
}

fn scales(len: usize) -> Vec<f32> {
    (0..len).map(|i| 0.005 + (i * 37 % 23) as f32 * 0.001).collect()
}

struct Quantized {
    shape: (usize, usize),
    tokens: usize,
    has_bias: bool,
    by_library: bool,
}

impl Check for Quantized {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        let Quantized { shape: (outputs, inputs), tokens, has_bias, .. } = *self;
        let by = if self.by_library { "cuBLASLt" } else { "either" };
        let what = format!("[{outputs}, {inputs}], {tokens} tokens, {:?}, bias {has_bias}, {by}", T::DTYPE);
        let (weight, of_rows, bias) = (integers(outputs * inputs, -128, 1), scales(outputs), numbers::<T>(outputs, 2));
        let mut x = numbers::<T>(tokens * inputs, 3);
        // The second token is zeros.
        x.iter_mut().skip(inputs).take(inputs).for_each(|x| *x = T::from_f32(0.0));
        let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let (q, of_tokens) = quantize(MatrixRef::new(tokens, inputs, &wide).unwrap()).unwrap();
        let result = |at: usize| {
            let (token, row) = (at / outputs, at % outputs);
            let (q, w) = (&q[token * inputs..][..inputs], &weight[row * inputs..][..inputs]);
            let sum: i32 = q.iter().zip(w).map(|(q, w)| i32::from(*q) * i32::from(*w)).sum();
            let bias = if has_bias { bias[row].to_f32() } else { 0.0 };
            T::from_f32((sum as f32).mul_add(of_rows[row] * of_tokens[token], bias))
        };
        let expected: Vec<T> = (0..tokens * outputs).map(result).collect();
        let bias = has_bias.then(|| up(context, &bias));
        let layer = DenseInt8Linear::new(context, (outputs, inputs), up(context, &weight), up(context, &of_rows), bias)
            .unwrap();
        let mut y = up(context, &vec![T::from_f32(f32::NAN); tokens * outputs]);
        let launched = layer.forward(up(context, &x).as_slice(), tokens, y.as_slice_mut());
        match launched {
            Err(Error::DataType { .. }) if T::DTYPE == DataType::F32 => return,
            Err(Error::NoLibrary { .. }) => return eprintln!("{what}: skipped without cuBLASLt"),
            launched => launched.unwrap(),
        }
        assert_eq!(y.to_host::<T>().unwrap(), expected, "{what}");
        let mut y = up(context, &vec![T::from_f32(f32::NAN); tokens * outputs]);
        let (q, of_tokens) = (up(context, &q), up(context, &of_tokens));
        layer.forward_quantized((q.as_slice(), of_tokens.as_slice()), tokens, y.as_slice_mut()).unwrap();
        assert_eq!(y.to_host::<T>().unwrap(), expected, "{what}, quantized before");
    }
}

#[test]
fn dense_integers_are_the_exact_sums_times_their_scales() {
    // 68 and 4 features, and more than 32 tokens, are cuBLASLt's.
    for shape in [(16, 64), (4, 64), (20, 128), (40, 1024), (100, 4160), (20, 68), (16, 4)] {
        for tokens in [1, 2, 3, 8, 9, 17, 32, 33] {
            for by_library in [false, true] {
                for_each_type(&Quantized { shape, tokens, has_bias: tokens != 2, by_library });
            }
        }
    }
}

struct NonFinite;

impl Check for NonFinite {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        if T::DTYPE == DataType::F32 {
            return;
        }
        let layer = DenseInt8Linear::new(
            context,
            (16, 64),
            up(context, &integers(1024, -128, 1)),
            up(context, &scales(16)),
            None,
        );
        let mut x = numbers::<T>(3 * 64, 3);
        x[70] = T::from_f32(f32::NAN);
        let mut y = up(context, &[T::from_f32(0.0); 48]);
        layer.unwrap().forward(up(context, &x).as_slice(), 3, y.as_slice_mut()).unwrap();
        let is_nan: Vec<bool> = y.to_host::<T>().unwrap().iter().map(|y| y.to_f32().is_nan()).collect();
        assert_eq!(is_nan, (0..48).map(|at| (16..32).contains(&at)).collect::<Vec<_>>());
    }
}

#[test]
fn a_token_with_a_nan_has_results_of_nan_and_no_other_has() {
    for_each_type(&NonFinite);
}

struct WeightOnly {
    is_int4: bool,
    shape: (usize, usize),
    tokens: usize,
}

impl Check for WeightOnly {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let WeightOnly { is_int4, shape: (outputs, inputs), tokens } = *self;
        let what = format!("int4 {is_int4} [{outputs}, {inputs}], {tokens} tokens, {:?}", T::DTYPE);
        let x = numbers::<T>(tokens * inputs, 3);
        let (layer, dense): (_, Vec<f64>) = match is_int4 {
            true => {
                let weight = integers(outputs * inputs, -8, 1);
                let scales: Vec<f16> = scales(outputs * inputs / 64).into_iter().map(f16::from_f32).collect();
                let packed = WeightOnlyLinear::packed_int4(&weight, (outputs, inputs)).unwrap();
                let dense = weight.iter().enumerate().map(|(i, w)| f64::from(*w) * f64::from(scales[i / 64])).collect();
                let (packed, scales) = (up(context, &packed), up(context, &scales));
                (WeightOnlyLinear::int4(context, (outputs, inputs), packed, scales), dense)
            }
            false => {
                let (weight, scales) = (integers(outputs * inputs, -128, 1), scales(outputs));
                let dense =
                    weight.iter().enumerate().map(|(i, w)| f64::from(*w) * f64::from(scales[i / inputs])).collect();
                let (weight, scales) = (up(context, &weight), up(context, &scales));
                (WeightOnlyLinear::int8(context, (outputs, inputs), weight, scales), dense)
            }
        };
        let layer = layer.unwrap();
        let mut y = up(context, &vec![T::from_f32(f32::NAN); tokens * outputs]);
        match layer.forward(up(context, &x).as_slice(), tokens, y.as_slice_mut()) {
            Err(Error::DataType { .. }) if T::DTYPE == DataType::F32 => return,
            launched => launched.unwrap(),
        }
        let result = |at: usize| -> f64 {
            let (x, w) = (&x[at / outputs * inputs..][..inputs], &dense[at % outputs * inputs..][..inputs]);
            x.iter().zip(w).map(|(x, w)| f64::from(x.to_f32()) * w).sum()
        };
        let expected: Vec<f64> = (0..tokens * outputs).map(result).collect();
        expect_close(&what, &y.to_host::<T>().unwrap(), &expected, tolerance / 4.0);
    }
}

#[test]
fn layers_whose_weight_alone_is_quantized_are_those_of_f64() {
    for is_int4 in [false, true] {
        for shape in [(16, 128), (1, 128), (20, 256), (40, 1024), (100, 4224)] {
            for tokens in [1, 3, 8, 9, 17, 32, 70] {
                for_each_type(&WeightOnly { is_int4, shape, tokens });
            }
        }
    }
    for tokens in [1, 40] {
        for_each_type(&WeightOnly { is_int4: false, shape: (33, 192), tokens });
    }
}

#[test]
fn packed_nibbles_are_all_columns_once_in_the_order_of_the_kernel() {
    // Which of 128 columns is where: all others are -8, whose nibble is 0.
    let mut places = vec![];
    for column in 0..128 {
        let mut values = [-8i8; 128];
        values[column] = 7;
        let packed = WeightOnlyLinear::packed_int4(&values, (1, 128)).unwrap();
        let nibbles: Vec<u8> = packed.iter().flat_map(|b| [*b as u8 & 15, *b as u8 >> 4]).collect();
        assert_eq!((nibbles.len(), nibbles.iter().filter(|n| **n == 15).count()), (128, 1), "{column}");
        places.push(nibbles.iter().position(|n| *n == 15).unwrap());
    }
    // Lane 1's second word of the second group begins with columns 64 + 16 + 8 and two on; nibble 4 is the column after
    // the first.
    let word = 8 * (4 + 3);
    assert_eq!((places[88], places[90], places[89]), (word, word + 1, word + 4));
    let error = |values: &[i8], shape| WeightOnlyLinear::packed_int4(values, shape).unwrap_err();
    assert!(matches!(error(&[0; 64], (1, 64)), Error::Multiple { multiple: 128, found: 64, .. }));
    assert!(matches!(error(&[0; 64], (1, 128)), Error::Length { expected: 128, found: 64, .. }));
    assert!(matches!(error(&[8; 128], (1, 128)), Error::Dimension { size: 8, .. }));
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let Some(device) = crate::support::device() else { return };
    let context = LayerContext::new(&device).unwrap();
    let zeros = |dtype, len| DeviceBuffer::zeros(&context, dtype, len).unwrap();
    let int8 = |inputs, weight, scales| {
        WeightOnlyLinear::int8(&context, (2, inputs), zeros(DataType::I8, weight), zeros(DataType::F32, scales))
    };
    assert!(int8(64, 128, 2).is_ok());
    assert!(matches!(int8(32, 64, 2), Err(Error::Multiple { multiple: 64, found: 32, .. })));
    assert!(matches!(int8(64, 127, 2), Err(Error::Length { expected: 128, found: 127, .. })));
    assert!(matches!(int8(64, 128, 3), Err(Error::Length { expected: 2, found: 3, .. })));
    let int4 = WeightOnlyLinear::int4(&context, (2, 128), zeros(DataType::I8, 128), zeros(DataType::F32, 4));
    assert!(matches!(int4, Err(Error::SliceType { expected: DataType::F16, .. })));
}
