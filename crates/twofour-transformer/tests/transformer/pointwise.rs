//! Sums, conversions and constants.

use half::{bf16, f16};
use twofour::Arithmetic;
use twofour_cuda::{Error, layer::LayerContext};
use twofour_transformer::cuda::{
    add, convert, copy, fill, scale_in_place, soft_cap, soft_cap_gradient, soft_cap_in_place,
};

use crate::{Check, context, for_each_type, reference::numbers, unwritten, up};

struct Case(usize);

impl Check for Case {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        let what = format!("{} {:?}", self.0, T::DTYPE);
        let (a, b, wide) = (numbers::<T>(self.0, 1), numbers::<T>(self.0, 2), numbers::<f32>(self.0, 3));
        let (a_there, b_there, wide_there) = (up(context, &a), up(context, &b), up(context, &wide));
        let mut out = unwritten::<T>(context, self.0);
        add(context, a_there.as_slice(), b_there.as_slice(), out.as_slice_mut()).unwrap();
        let sums: Vec<T> = a.iter().zip(&b).map(|(a, b)| T::from_f32(a.to_f32() + b.to_f32())).collect();
        assert!(out.to_host::<T>().unwrap() == sums, "{what}: sums");
        convert(context, wide_there.as_slice(), out.as_slice_mut()).unwrap();
        let narrow: Vec<T> = wide.iter().map(|x| T::from_f32(*x)).collect();
        assert!(out.to_host::<T>().unwrap() == narrow, "{what}: from f32");
        copy(context, a_there.as_slice(), out.as_slice_mut()).unwrap();
        assert!(out.to_host::<T>().unwrap() == a, "{what}: copied");
        let (at, mut whole) = (self.0 / 3, out.as_slice_mut());
        let (from, to) = (a_there.as_slice().part(at..self.0).unwrap(), whole.part(0..self.0 - at).unwrap());
        copy(context, from, to).unwrap();
        assert!(out.to_host::<T>().unwrap()[..self.0 - at] == a[at..], "{what}: a part");
        assert!(matches!(a_there.as_slice().part(0..self.0 + 1), Err(Error::Length { .. })), "{what}");
        let mut back = unwritten::<f32>(context, self.0);
        convert(context, a_there.as_slice(), back.as_slice_mut()).unwrap();
        assert!(back.to_host::<f32>().unwrap().iter().zip(&a).all(|(b, a)| *b == a.to_f32()), "{what}: to f32");
        let mut y = up(context, &a);
        scale_in_place(context, 1.7, y.as_slice_mut()).unwrap();
        let scaled: Vec<T> = a.iter().map(|a| T::from_f32(a.to_f32() * 1.7)).collect();
        assert!(y.to_host::<T>().unwrap() == scaled, "{what}: scaled");
        // Far beyond the cap, where exponentials are 0 or infinite, too.
        let x: Vec<T> = a.iter().map(|a| T::from_f32(a.to_f32() * 3.0)).chain([T::from_f32(60_000.0)]).collect();
        let tolerance = if T::DTYPE == twofour::DataType::F32 { 1e-6 } else { 4e-3 };
        let tanh = |x: &T| (2.0 * f64::from(x.to_f32())).tanh();
        let expect = |found: Vec<T>, expected: &dyn Fn(&T) -> f64| {
            for (found, x) in found.iter().zip(&x) {
                assert!((f64::from(found.to_f32()) - expected(x)).abs() < tolerance, "{what}: {found:?} of {x:?}");
            }
        };
        let (x_there, mut y) = (up(context, &x), unwritten::<T>(context, x.len()));
        soft_cap(context, 0.5, x_there.as_slice(), y.as_slice_mut()).unwrap();
        expect(y.to_host::<T>().unwrap(), &|x| 0.5 * tanh(x));
        fill(context, -0.75, y.as_slice_mut()).unwrap();
        soft_cap_gradient(context, 0.5, x_there.as_slice(), y.as_slice_mut()).unwrap();
        expect(y.to_host::<T>().unwrap(), &|x| -0.75 * (1.0 - tanh(x).powi(2)));
        let mut y = up(context, &x);
        soft_cap_in_place(context, 0.5, y.as_slice_mut()).unwrap();
        expect(y.to_host::<T>().unwrap(), &|x| 0.5 * tanh(x));
        fill(context, 0.3, out.as_slice_mut()).unwrap();
        assert!(out.to_host::<T>().unwrap() == vec![T::from_f32(0.3); self.0], "{what}: filled");
    }
}

#[test]
fn elements_are_added_converted_and_filled_to_the_bit() {
    for len in [0, 1, 7, 8, 1000, 65_537] {
        for_each_type(&Case(len));
    }
}

#[test]
fn a_conversion_has_f32_on_one_side() {
    let Some(context) = context() else { return };
    let (from, mut to) = (up(&context, &[f16::ONE]), up(&context, &[bf16::ONE]));
    assert!(matches!(convert(&context, from.as_slice(), to.as_slice_mut()), Err(Error::DataType { .. })));
}
