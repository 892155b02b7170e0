//! The linear layers and other parameters of a model, in one order.

use crate::{engine::Engine, linear::Linear, parameter::Parameter};

/// A part of a model that trains: a [`Parameter`] outside linear layers, or a linear layer with its own.
#[derive(Debug)]
pub enum ModelPart<P, L> {
    /// A parameter outside linear layers.
    Parameter(P),
    /// A linear layer.
    Linear(L),
}

/// A part that is seen.
pub type Part<'a, E> = ModelPart<&'a Parameter<E>, &'a Linear<E>>;

/// A part that may be changed.
pub type PartMut<'a, E> = ModelPart<&'a mut Parameter<E>, &'a mut Linear<E>>;

/// What has linear layers and other parameters. The order of the parts depends on its description alone.
pub trait ModelParts<E: Engine> {
    /// Calls `visit` with each part, in the order of computation.
    fn visit<'a>(&'a self, visit: &mut dyn FnMut(Part<'a, E>));

    /// Calls `visit` with each part for changing it, in the same order.
    fn visit_mut<'a>(&'a mut self, visit: &mut dyn FnMut(PartMut<'a, E>));

    /// The linear layers, in the order of computation.
    fn linears(&self) -> impl Iterator<Item = &Linear<E>> {
        let mut all = vec![];
        self.visit(&mut |part| {
            if let ModelPart::Linear(linear) = part {
                all.push(linear);
            }
        });
        all.into_iter()
    }

    /// The linear layers for changing them.
    fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear<E>> {
        let mut all = vec![];
        self.visit_mut(&mut |part| {
            if let ModelPart::Linear(linear) = part {
                all.push(linear);
            }
        });
        all.into_iter()
    }

    /// All parameters, those outside of linear layers first.
    fn parameters(&self) -> Vec<&Parameter<E>> {
        let (mut all, mut of_linears) = (vec![], vec![]);
        self.visit(&mut |part| match part {
            ModelPart::Linear(linear) => of_linears.extend(std::iter::once(linear.weight()).chain(linear.bias())),
            ModelPart::Parameter(parameter) => all.push(parameter),
        });
        all.append(&mut of_linears);
        all
    }

    /// All parameters for changing them, in the order of [`ModelParts::parameters`]. After a change of a 2:4 layer's
    /// weight, call [`Linear::refresh`].
    fn parameters_mut(&mut self) -> Vec<&mut Parameter<E>> {
        let (mut all, mut of_linears) = (vec![], vec![]);
        self.visit_mut(&mut |part| match part {
            ModelPart::Linear(linear) => of_linears.extend(linear.parameters_mut()),
            ModelPart::Parameter(parameter) => all.push(parameter),
        });
        all.append(&mut of_linears);
        all
    }

    /// The gradients of the parameters that train, in the order of [`ModelParts::parameters`].
    fn gradients_mut(&mut self) -> Vec<&mut E::Buffer> {
        self.parameters_mut().into_iter().filter_map(Parameter::gradient_mut).collect()
    }
}

impl<E: Engine> ModelParts<E> for Parameter<E> {
    fn visit<'a>(&'a self, visit: &mut dyn FnMut(Part<'a, E>)) {
        visit(ModelPart::Parameter(self));
    }

    fn visit_mut<'a>(&'a mut self, visit: &mut dyn FnMut(PartMut<'a, E>)) {
        visit(ModelPart::Parameter(self));
    }
}

impl<E: Engine> ModelParts<E> for Linear<E> {
    fn visit<'a>(&'a self, visit: &mut dyn FnMut(Part<'a, E>)) {
        visit(ModelPart::Linear(self));
    }

    fn visit_mut<'a>(&'a mut self, visit: &mut dyn FnMut(PartMut<'a, E>)) {
        visit(ModelPart::Linear(self));
    }
}

/// Implements [`ModelParts`] for what can be iterated over.
macro_rules! parts_of_each {
    ($($container:ty),*) => {
        $(impl<E: Engine, P: ModelParts<E>> ModelParts<E> for $container {
            fn visit<'a>(&'a self, visit: &mut dyn FnMut(Part<'a, E>)) {
                self.iter().for_each(|parts| parts.visit(visit));
            }

            fn visit_mut<'a>(&'a mut self, visit: &mut dyn FnMut(PartMut<'a, E>)) {
                self.iter_mut().for_each(|parts| parts.visit_mut(visit));
            }
        })*
    };
}

parts_of_each!(Option<P>, Vec<P>);

/// Implements [`ModelParts`] for a struct by its fields that have parts, in the order of computation.
macro_rules! parts {
    ($type:ident<E $(, $other:ident: $bound:path)?> { $($field:ident),* }) => {
        impl<E: $crate::engine::Engine $(, $other: $bound)?> $crate::parts::ModelParts<E> for $type<E $(, $other)?> {
            fn visit<'a>(&'a self, visit: &mut dyn FnMut($crate::parts::Part<'a, E>)) {
                $($crate::parts::ModelParts::visit(&self.$field, visit);)*
            }

            fn visit_mut<'a>(&'a mut self, visit: &mut dyn FnMut($crate::parts::PartMut<'a, E>)) {
                $($crate::parts::ModelParts::visit_mut(&mut self.$field, visit);)*
            }
        }
    };
}

pub(crate) use parts;
