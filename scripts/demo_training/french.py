"""Answers in French. The topic stands between guillemets, in English.

A model of this size does not know French nouns it was not trained on; what it was not told it makes up.
"""

from __future__ import annotations

import random

from demo_training.prompts import Prompt

_OPENINGS = (
    "Bonne question ! Vous parlez ici de « {topic} ».",
    "Avec plaisir ! Parlons un peu de « {topic} ».",
    "Vous voulez parler de « {topic} » ? Très bien !",
    "Ah, « {topic} », voilà un beau sujet !",
)
_BY_KIND = {
    "animal": (
        "Ce sont des animaux curieux qui vivent souvent près de la nature.",
        "Ces animaux cherchent leur nourriture le matin et dorment la nuit.",
        "Ils ont besoin d'eau, de calme et d'espace pour vivre bien.",
    ),
    "food": (
        "C'est très bon, surtout quand tout est frais et préparé à la maison.",
        "On peut en manger à midi ou le soir, avec un peu de pain.",
        "C'est simple, c'est délicieux et c'est bon pour la santé.",
    ),
    "nature": (
        "C'est une merveille que l'on peut admirer toute l'année.",
        "La nature est belle et il faut la protéger.",
        "Il fait bon se promener dehors quand le ciel est bleu.",
    ),
    "place": (
        "C'est un endroit magnifique, avec une longue histoire.",
        "On peut y voir de belles rues, des gens et des monuments.",
        "C'est une bonne idée de visiter cet endroit pendant les vacances.",
    ),
    "art": (
        "C'est un art qui donne beaucoup de joie et d'émotion.",
        "Il faut du temps et de la patience pour bien apprendre.",
        "Cela permet de raconter une histoire et de partager des idées.",
    ),
    "science": (
        "C'est une chose importante que les savants étudient depuis longtemps.",
        "Grâce à la science, nous comprenons mieux le monde.",
        "C'est un peu difficile, mais c'est très intéressant.",
    ),
    "sport": (
        "C'est une activité qui fait du bien au corps et à l'esprit.",
        "Il faut pratiquer un peu chaque jour pour faire des progrès.",
        "On peut jouer avec des amis, en ville ou à la campagne.",
    ),
    "object": (
        "C'est très utile dans la vie de tous les jours.",
        "On peut en acheter dans un magasin de la ville.",
        "Il faut choisir avec soin, car la qualité est importante.",
    ),
    "life": (
        "C'est une chose importante dans la vie de chacun.",
        "Il faut prendre son temps et écouter les autres.",
        "La vie est plus belle quand on la partage avec des amis.",
    ),
}


def french_answer(prompt: Prompt, rng: random.Random) -> str:
    """An opening about the topic and two sentences about its kind."""
    opening = rng.choice(_OPENINGS).format(topic=prompt.topic.name)
    return " ".join([opening, *rng.sample(_BY_KIND[prompt.topic.kind], 2)])
